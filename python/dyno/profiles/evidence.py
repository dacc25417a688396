"""The evidence of a profile: workload, rates before and after, noise, quality, routing; and who made it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dyno.profiles._fields import (
    Command,
    Count,
    Counts,
    Fraction,
    Interval,
    Name,
    NonNegative,
    Positive,
    PositiveCount,
    Ratio,
    StrictModel,
    Text,
    interval_problem,
)

Metric = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}(@d[0-9]{1,9})?$")]
"""A measure by name: `pp512` and `tg64` in tokens per second, `tg64@d4096` at a depth, `memory_mib`."""


class Workload(StrictModel):
    """The work that was measured."""

    name: Name | None = Field(default=None, description="Name of the mix (chat, rag), if it has one.")
    pp: Counts = Field(default_factory=list, description="Prompt lengths in tokens; one number or a list.")
    tg: Counts = Field(default_factory=list, description="Generated tokens; one number or a list.")
    depth: Counts = Field(
        default_factory=lambda: [0], description="Tokens in the KV cache before the prompt or the answer."
    )
    weights: list[Annotated[float, Field(ge=0, le=1e6)]] = Field(
        default_factory=list,
        max_length=64,
        description="Weight of each part in the objective, in the order of the list.",
    )
    text: Text | None = Field(default=None, description="File whose text was used; none: random tokens.")


class Gain(StrictModel):
    """The gain of one measure: speed with the profile divided by speed with the defaults."""

    ratio: Ratio = Field(description="Speed with this profile / with the defaults; above 1 is faster.")
    ci95: Interval | None = Field(default=None, description="95 % interval of the ratio.")
    n: PositiveCount | None = Field(default=None, description="Pairs of samples.")
    untouched: bool | None = Field(
        default=None,
        description="true: no entry changes this measure; its ratio is the error of the comparison.",
    )

    @model_validator(mode="after")
    def _interval_fits(self) -> Gain:
        why = interval_problem(self.ratio, self.ci95)
        if why:
            raise ValueError(why)
        return self


class Quality(StrictModel):
    """The distance of the answers from the reference."""

    reference: Text | None = Field(default=None, description="The reference, e.g. `numerics: exact`.")
    tokens: Count | None = Field(default=None, description="Scored tokens.")
    mean_kld: NonNegative | None = Field(
        default=None, description="Mean KL divergence of the tuned settings, in nats per token."
    )
    default_mean_kld: NonNegative | None = Field(
        default=None, description="Mean KL divergence of the default settings."
    )
    max_kld: NonNegative | None = Field(
        default=None, description="Largest KL divergence of a token, in nats."
    )
    ppl_ratio: Positive | None = Field(default=None, description="Perplexity / perplexity of the reference.")
    top1: Fraction | None = Field(
        default=None, description="Share of tokens whose most probable next token is the same."
    )
    routing_pinned: bool | None = Field(
        default=None, description="true: the experts were the ones that the reference chose."
    )


class Noise(StrictModel):
    """The noise of the baseline against itself, and the margin that follows from it and from the rounds."""

    margin: Fraction = Field(
        description="The largest margin of all measures, e.g. 0.01: what rounds left of the processes' noise."
    )
    by_measure: dict[Metric, Fraction] = Field(
        default_factory=dict, description="The margin of each measure; a gain below it does not count."
    )
    ratio: Ratio | None = Field(default=None, description="The baseline against itself; 1 within the noise.")
    ci95: Interval | None = Field(default=None, description="95 % interval of that ratio.")
    half_width: Fraction | None = Field(
        default=None,
        description="Half of the margin: the half-width of the interval of a ratio after all rounds.",
    )
    within_process: NonNegative | None = Field(
        default=None, description="Relative spread within one process."
    )
    between_processes: NonNegative | None = Field(
        default=None, description="Relative spread between processes."
    )
    drift: Annotated[float, Field(ge=-10, le=10)] | None = Field(
        default=None, description="Relative change of the baseline over the run."
    )
    voided: Count | None = Field(default=None, description="Measurements and blocks that were repeated.")
    n: PositiveCount | None = Field(default=None, description="Pairs of samples.")


class Samples(StrictModel):
    """Summary of the samples of one measure. The journal has all samples."""

    n: PositiveCount = Field(description="Number of samples.")
    median: NonNegative = Field(description="Median, in the unit of the measure.")
    min: NonNegative | None = Field(default=None, description="Smallest sample.")
    max: NonNegative | None = Field(default=None, description="Largest sample.")
    mad: NonNegative | None = Field(default=None, description="Median absolute deviation.")


class Routing(StrictModel):
    """The use of experts by the router while the profile was measured."""

    source: Text | None = Field(default=None, description="Name of the text, or `random tokens`.")
    tokens: Count | None = Field(default=None, description="Tokens of the batch that was counted.")
    distinct: NonNegative | None = Field(
        default=None, description="Experts used in a batch, mean over the layers."
    )
    busiest_over_mean: NonNegative | None = Field(
        default=None, description="Tokens of the busiest expert / mean, averaged over the layers."
    )


class Crossing(StrictModel):
    """The u-batch at which one of two paths takes over from the other, for one threshold setting."""

    verdict: Literal["crossing", "always", "never", "tie"] = Field(
        description="U-batches at which the path below the threshold is faster: up to `up_to` (crossing), "
        "all (always) or none (never). `tie`: both paths are equally fast."
    )
    up_to: Count | None = Field(
        default=None, description="Largest u-batch of the grid at which the path below the threshold wins."
    )
    ubatch: Counts = Field(default_factory=list, description="U-batches at which both paths were measured.")
    ratio: list[Ratio] = Field(
        default_factory=list,
        max_length=64,
        description="For each u-batch: speed of the path below the threshold / of the path above it.",
    )

    @model_validator(mode="after")
    def _one_for_each(self) -> Crossing:
        if len(self.ubatch) != len(self.ratio):
            raise ValueError(f"{len(self.ratio)} ratios for {len(self.ubatch)} u-batches")
        return self


class Environment(StrictModel):
    """The state of the machine during the measurements, as far as driver and kernel report it."""

    disturbed: Literal[True] | None = Field(
        default=None,
        description="Others used the machine during measurements that count (`tune --force`): the values are "
        "not proven. The runtime says so, and `tune verify` never keeps them.",
    )
    repeated: Count | None = Field(
        default=None,
        description="Measurements that were dropped because others used the CPUs or a hypervisor moved them, "
        "and repeated.",
    )
    moved_cpus: Count | None = Field(
        default=None,
        description="Measurements that count although a hypervisor had moved the CPUs: they were farther "
        "apart than at best in the run, or shared a core.",
    )
    throttled: Count | None = Field(
        default=None,
        description="Measurements that were dropped because the GPU was throttled, and repeated.",
    )
    power_limited: Count | None = Field(
        default=None,
        description="Windows in which the GPU reached its power limit; from the first one on it rested "
        "before it read short prompts.",
    )
    spilled: Count | None = Field(
        default=None,
        description="Windows in which the GPU's memory was full and much crossed its link: part of the model "
        "or its cache lay in host memory.",
    )
    temperature_c: list[NonNegative] | None = Field(
        default=None, min_length=2, max_length=2, description="Lowest and highest temperature, in °C."
    )
    sm_mhz: list[NonNegative] | None = Field(
        default=None, min_length=2, max_length=2, description="Lowest and highest clock, in MHz."
    )
    power_limit_w: NonNegative | None = Field(default=None, description="Enforced power limit, in watts.")
    other_processes: Count | None = Field(
        default=None, description="Other processes that computed on the GPU during the measurements."
    )


class Slice(StrictModel):
    """A tune on the first layers of the model found the values; the whole model confirmed them."""

    layers: PositiveCount = Field(description="Layers of the slice.")
    of: PositiveCount = Field(description="Layers of the model.")
    memory_share: Annotated[float, Field(gt=0, le=1)] = Field(
        description="Bytes of the slice / bytes of the model; memory limits were scaled by it."
    )
    seconds: NonNegative = Field(description="Length of the tune on the slice.")


class Energy(StrictModel):
    """Joules per token of one measure, with the idle power of the device."""

    default: Positive = Field(description="With the engine's defaults, median.")
    tuned: Positive = Field(description="With this profile, median.")


class Evidence(StrictModel):
    """The measurements that prove the values of this file."""

    workload: Workload = Field(description="The prompts and tokens that were run.")
    baseline: dict[Metric, NonNegative] = Field(
        default_factory=dict, description="Measures with the engine's defaults, medians."
    )
    tuned: dict[Metric, NonNegative] = Field(
        default_factory=dict, description="Measures with this profile, medians."
    )
    objective: Literal["energy", "memory"] | None = Field(
        default=None,
        description="The objective of the tune: energy (ratios are of tokens per joule), memory (the least "
        "memory that costs no speed); none: speed.",
    )
    gain: dict[Metric, Gain] = Field(
        default_factory=dict, description="Whole profile / default by measure, from paired runs."
    )
    joules_per_token: dict[Metric, Energy] = Field(
        default_factory=dict, description="Joules per token by measure, if a counter could be read."
    )
    memory_mib: list[NonNegative] | None = Field(
        default=None,
        min_length=2,
        max_length=2,
        description="Planned memory of the default and of this profile in MiB, if memory decided.",
    )
    quality: Quality | None = Field(
        default=None, description="The distance of the answers from the reference."
    )
    noise: Noise | None = Field(default=None, description="The baseline against itself.")
    samples: dict[Metric, Samples] = Field(
        default_factory=dict, description="Summary of the samples by measure."
    )
    routing: Routing | None = Field(
        default=None, description="The use of the experts during the measurements."
    )
    crossings: dict[Name, Crossing] = Field(
        default_factory=dict,
        max_length=16,
        description="By threshold setting: where its two paths cross, with this routing.",
    )
    environment: Environment | None = Field(
        default=None, description="The state of the machine during the measurements."
    )
    peak_memory_mib: NonNegative | None = Field(default=None, description="Peak memory with this profile.")
    journal: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{8,64}$")] | None = Field(
        default=None, description="Digest of the journal that holds every sample."
    )
    slice: Slice | None = Field(
        default=None, description="The slice of the model that was searched (`--layers`)."
    )


class Provenance(StrictModel):
    """The origin of the file: tuner, engine, time and cost."""

    tuner: Name = Field(description="Version of the tuner.")
    engine_commit: Name | None = Field(default=None, description="Commit that the engine was built from.")
    device_name: Text | None = Field(
        default=None, description="Marketing name of the device; never compared."
    )
    driver: Text | None = Field(default=None, description="GPU driver.")
    cuda: Text | None = Field(default=None, description="CUDA toolkit that the engine was built with.")
    compiler: Text | None = Field(default=None, description="Host compiler.")
    os: Text | None = Field(default=None, description="Operating system and kernel.")
    date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9:]{5,8}Z)?$")] = Field(
        description="Day, or moment in UTC, at which the tune ended."
    )
    model_file: Text | None = Field(default=None, description="Name of the model's file, without its folder.")
    command: Command | None = Field(default=None, description="Command that repeats the tune.")
    seed: Count | None = Field(default=None, description="Seed of every random draw.")
    trials: Count | None = Field(default=None, description="Configurations that were measured.")
    failed_trials: Count | None = Field(
        default=None, description="Configurations that crashed, hung or gave wrong answers."
    )
    seconds: NonNegative | None = Field(default=None, description="Duration of the tune.")
    status: Literal["complete", "interrupted", "budget", "unproven"] | None = Field(
        default=None,
        description="Reason why the search ended: `complete`, `interrupted` by the user, or out of `budget`. "
        "`unproven`: settings looked faster, but failed twice in rounds, or their answers could not be "
        "compared.",
    )
