"""`dyno chat`: a conversation with a model at the terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dyno._cli import drawing, options, state
from dyno._home import home

if TYPE_CHECKING:
    from collections.abc import Iterator


def chat(
    model_file: options.ModelFile = None,
    model: options.Model = None,
    system: drawing.System = None,
    chat_template: drawing.ChatTemplateName = None,
    chat_template_kwargs: drawing.TemplateVariables = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "--n-predict", "-n", help="Of an answer; -1: to the context's end.")
    ] = -1,
    temperature: Annotated[
        float, typer.Option("--temperature", "--temp", help="0: the most probable token every time.")
    ] = 0.8,
    top_k: drawing.TopK = 40,
    top_p: drawing.TopP = 0.95,
    min_p: drawing.MinP = 0.05,
    seed: drawing.Seed = None,
    typical_p: drawing.TypicalP = None,
    xtc_probability: drawing.XtcProbability = None,
    xtc_threshold: drawing.XtcThreshold = None,
    repeat_penalty: drawing.RepeatPenalty = None,
    repeat_last_n: drawing.RepeatLastN = None,
    presence_penalty: drawing.PresencePenalty = None,
    frequency_penalty: drawing.FrequencyPenalty = None,
    dry_multiplier: drawing.DryMultiplier = None,
    dry_base: drawing.DryBase = None,
    dry_allowed_length: drawing.DryAllowedLength = None,
    logit_bias: drawing.LogitBias = None,
    stop: drawing.Stop = None,
    history: Annotated[bool, typer.Option(help="Keep what was typed for the next time.")] = True,
    device: options.Device = "auto",
    gpu: options.Gpu = None,
    override_tensor: options.OverrideTensor = None,
    n_gpu_layers: options.GpuLayers = None,
    cpu_moe: options.CpuMoe = None,
    n_cpu_moe: options.NCpuMoe = None,
    virtual_devices: options.VirtualDevices = None,
    vram: options.Vram = None,
    ram: options.Ram = None,
    split_mode: options.SplitMode = None,
    tensor_split: options.TensorSplit = None,
    profile: options.ProfileFile = None,
    no_profile: options.NoProfile = False,
    require_profile: options.RequireProfile = False,
    force_profile: options.ForceProfile = False,
    ctx: options.Ctx = None,
    ubatch: options.Ubatch = None,
    threads: options.Threads = None,
    threads_batch: options.ThreadsBatch = None,
    kv_type_k: options.KvTypeK = None,
    kv_type_v: options.KvTypeV = None,
    set_: options.Set = None,
    verbose: state.Verbose = 0,
) -> None:
    """Talk to a model. /help lists the commands; Ctrl-C ends an answer, Ctrl-D the conversation.

    If stdin is no terminal, each of its lines is a message.
    """
    state.verbosity(verbose)
    path = options.model_argument(model_file, model)
    if max_tokens < -1 or max_tokens == 0:
        raise typer.BadParameter(
            f"{max_tokens} is not a length of an answer; give 1 or more", param_hint="-n"
        )
    arguments = options.settings(
        set_,
        ctx=ctx,
        ubatch=ubatch,
        threads=threads,
        threads_batch=threads_batch,
        kv_type_k=kv_type_k,
        kv_type_v=kv_type_v,
    )
    chosen = options.profile_argument(profile, no_profile, require_profile, force_profile)
    chosen |= options.placement_arguments(
        override_tensor,
        n_gpu_layers,
        cpu_moe,
        n_cpu_moe,
        virtual_devices,
        vram,
        ram,
        split_mode,
        tensor_split,
    )
    more = drawing.draw_options(
        logit_bias,
        typical_p=typical_p,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
        repeat_penalty=repeat_penalty,
        repeat_last_n=repeat_last_n,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        dry_multiplier=dry_multiplier,
        dry_base=dry_base,
        dry_allowed_length=dry_allowed_length,
    )
    variables = drawing.template_variables(chat_template_kwargs)
    lines = _typed(history) if sys.stdin.isatty() else iter(sys.stdin)

    from dyno._cli.conversation import Conversation
    from dyno.engine import Engine

    with Engine(path, options.device_argument(device, gpu), **options.once(chosen, arguments)) as engine:
        state.print_choices(engine)
        conversation = Conversation(
            engine,
            engine.chat_template(chat_template),
            system=system,
            variables=variables,
            max_tokens=None if max_tokens < 0 else max_tokens,
            stop=stop,
            options={
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "min_p": min_p,
                "seed": seed,
                **more,
            },
        )
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")
        for line in lines:
            if not conversation.say(line.rstrip("\n")):
                break


def history_file() -> Path:
    """Where what was typed is kept, for the next conversation."""
    given = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(given) if os.path.isabs(given) else home() / ".local" / "state"
    return folder / "dyno" / "chat_history"


def _typed(keep: bool) -> Iterator[str]:
    """The messages that somebody types, until Ctrl-D.

    Raises:
        ImportError: prompt-toolkit is not installed.
    """
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, InMemoryHistory
    except ImportError as error:
        raise ImportError(
            "dyno chat needs prompt-toolkit, which is missing: pip install 'gguf-dyno[chat]'"
        ) from error
    if keep:
        file = history_file()
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(file)) if keep else InMemoryHistory(), key_bindings=_bindings()
    )
    return _lines(session)


def _lines(session: Any) -> Iterator[str]:
    while True:
        try:
            yield session.prompt("> ", prompt_continuation="  ", multiline=True)
        except KeyboardInterrupt:  # an empty line instead of what was typed
            continue
        except EOFError:
            return


def _bindings() -> Any:
    """Enter sends; Alt-Enter begins a new line."""
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
