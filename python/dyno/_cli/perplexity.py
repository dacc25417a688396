"""`dyno perplexity`: the perplexity of a text and the KL divergence from a reference."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path  # noqa: TC003 - typer reads annotations at run time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dyno._cli import groups, options, state

if TYPE_CHECKING:
    from dyno.engine import Engine
    from dyno.perplexity import Perplexity
    from dyno.reference import ReferenceReader


@groups.grouped
def perplexity(
    model_file: options.ModelFile = None,
    model: options.Model = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="UTF-8 text to score. Not needed with --reference.")
    ] = None,
    ctx: Annotated[
        int | None,
        typer.Option(
            "--ctx",
            "--ctx-size",
            "-c",
            help="Chunk length in tokens. Default: 512, or the length in the reference.",
        ),
    ] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="Maximum number of chunks.")] = None,
    save_reference: Annotated[
        Path | None, typer.Option(help="Save the log-probabilities to this file for a later --reference.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Compare with the log-probabilities that --save-reference saved.")
    ] = None,
    json_: options.Json = False,
    *,
    session: groups.SessionOptions,
    opening: groups.EngineOptions,
    verbose: state.Verbose = 0,
) -> None:
    """Compute perplexity as llama.cpp does: the second half of each chunk is scored."""
    state.verbosity(verbose)
    model = options.model_argument(model_file, model)
    if file is None and reference is None:
        raise typer.BadParameter(
            "no text was given; give the text to score, or compare with --reference FILE",
            param_hint="--file",
        )
    if save_reference is not None and reference is not None:
        raise typer.BadParameter(
            "contradicts --reference; give only one of the two", param_hint="--save-reference"
        )
    arguments = opening.arguments(**session.given())

    from dyno import perplexity as measure
    from dyno._progress import progress
    from dyno.engine import Engine
    from dyno.errors import PlanError
    from dyno.reference import ReferenceReader, ReferenceWriter, check_destination

    if save_reference is not None:
        check_destination(save_reference)
    text = None if file is None else options.text_of(file)  # before a large model loads
    with ExitStack() as stack:
        theirs = None if reference is None else stack.enter_context(ReferenceReader(reference))
        asked = options.ctx_argument(ctx, model)
        length = asked if asked is not None else 512 if theirs is None else theirs.ctx
        engine = stack.enter_context(
            Engine(
                model,
                opening.device_name,
                **{"ctx": max(length, 1), **arguments},
            )
        )
        state.print_choices(engine)
        n_vocab = int(engine.model["n_vocab"])
        if theirs is not None and theirs.n_vocab != n_vocab:
            raise PlanError(
                f"[perplexity] {reference} has a vocabulary of {theirs.n_vocab} tokens, and {model} one of "
                f"{n_vocab}; give a reference that was saved with the same model"
            )
        tokens = _chunks(engine, text, length, chunks, theirs)
        save = None
        if save_reference is not None:
            save = stack.enter_context(ReferenceWriter(save_reference, tokens, n_vocab, model.name))
        advance = stack.enter_context(progress("perplexity", len(tokens)))
        result = measure.perplexity(
            engine,
            tokens,
            save=save,
            reference=theirs,
            on_chunk=lambda number, ppl: advance(1, f"ppl {ppl:.4f}"),
        )
    if json_:
        print(json.dumps(result.to_dict()))
    else:
        _print(result)


def _chunks(
    engine: Engine, text: str | None, ctx: int, chunks: int | None, reference: ReferenceReader | None
) -> Any:
    from dyno.perplexity import chunk_tokens

    if text is None:
        assert reference is not None  # checked by the caller
        return reference.tokens if chunks is None else reference.tokens[:chunks]
    tokenizer = engine.tokenizer
    tokens = tokenizer.encode(text)
    bos = tokenizer.bos if tokenizer.vocabulary.add_bos else None
    return chunk_tokens(tokens, ctx, chunks, bos)


def _print(result: Perplexity) -> None:
    out = sys.stdout
    out.write(f"ppl {result.ppl:.4f} ± {result.stderr:.4f}")
    chunks = "1 chunk" if result.chunks == 1 else f"{result.chunks} chunks"
    out.write(f"  ({result.tokens} tokens, {chunks} of {result.ctx})\n")
    if result.comparison is not None:
        c = result.comparison
        out.write(f"reference ppl {result.reference_ppl:.4f}, ratio {result.ppl_ratio:.6f}\n")
        out.write(f"mean KLD {c.mean_kld:.3e} ± {c.kld_stderr:.1e}, max {c.max_kld:.3e}\n")
        out.write(f"same top token {100 * c.top1_agreement:.3f} %\n")
