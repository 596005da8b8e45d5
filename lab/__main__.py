"""The laboratory's command line: `python -m lab`, from a checkout."""

from __future__ import annotations

import shlex
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit(
        "lab: expected the environment of deep_gemm, found none. Run: make demo; then: source .venv/bin/activate"
    ) from None

from deep_gemm.__main__ import WRONG, Commands, OutputName, refused
from deep_gemm.__main__ import examples as examples_of

if TYPE_CHECKING:
    from deep_gemm.gemm.config.tall import GemmConfig
    from deep_gemm.gemm.kinds.output import Output

examples = partial(examples_of, program="lab")
app = typer.Typer(
    cls=Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich"
)


KernelName = Annotated[str, typer.Argument(help="the kernel, named as its file; a wrong name lists all")]
ConfigName = Annotated[
    str | None, typer.Option(help="a configuration as `configs` names it; fp8_gemm's may be stated instead")
]
ClusterM = Annotated[int, typer.Option(help="2: pairs of CTAs share B")]
ClusterN = Annotated[int, typer.Option(help="2: pairs of CTAs share A")]
ClusterK = Annotated[int, typer.Option(help="2 to 8: this many CTAs split k")]
WithC = Annotated[bool, typer.Option("--with-c", help="read C and add it")]
AddsToD = Annotated[bool, typer.Option("--adds-to-d", help="add to D in place (FP32)")]
ByRow = Annotated[bool, typer.Option("--by-row", help="B has a scale for each row and 128 columns")]


@app.callback(
    epilog=examples("bench dense --quick", "sim --seeds 4", "inspect --block-m 256 --block-n 128", "soak --minutes 8")
    + "\n\nExit codes: 0 all right; 1 something failed or was found wrong; 2 the request cannot be carried out."
)
def about() -> None:
    """Look at the kernels of deep_gemm: simulator, benchmark, soak, tuning, machine code."""


@app.command(
    epilog=examples("sim --seeds 4", "sim cast_tiles --set shape=(40,72)", "sim fp8_gemm --set m=40 --set k=272 --fp32")
)
def sim(
    kernel: KernelName = "fp8_gemm",
    config: ConfigName = None,
    seeds: Annotated[int, typer.Option(min=1, help="number of trials, each drawn from a seed")] = 8,
    first_seed: Annotated[int, typer.Option(min=0, help="the first seed")] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="a field of each trial, such as n=72; a wrong one lists all")
    ] = None,
    block_m: Annotated[int, typer.Option(help="rows of a tile")] = 128,
    block_n: Annotated[int, typer.Option(help="columns of a tile")] = 128,
    cluster_m: ClusterM = 1,
    cluster_n: ClusterN = 1,
    cluster_k: ClusterK = 1,
    fp32: Annotated[bool, typer.Option("--fp32", help="FP32 output")] = False,
    with_c: WithC = False,
    adds_to_d: AddsToD = False,
    by_row: ByRow = False,
) -> None:
    """Run a kernel's own source on a simulated GPU, under many schedules (needs g++)."""
    from .kernels import config_named, kernel_named
    from .sim import HostCompileError
    from .sim.command import run

    with refused(ValueError, HostCompileError):
        listed = kernel_named(kernel)
        options = [f"--set {shlex.quote(setting)}" for setting in settings or ()]
        if kernel == "fp8_gemm" and config is None:
            form = _output_of(fp32=fp32, with_c=with_c, adds_to_d=adds_to_d, by_row=by_row)
            chosen = _stated(block_m, block_n, form, cluster_m, cluster_n, cluster_k, k=128)  # of any depth
            numbers = {
                "--block-m": block_m,
                "--block-n": block_n,
                "--cluster-m": cluster_m,
                "--cluster-n": cluster_n,
                "--cluster-k": cluster_k,
            }
            options += [f"{name} {value}" for name, value in numbers.items()]
            switches = {"--fp32": fp32, "--with-c": with_c, "--adds-to-d": adds_to_d, "--by-row": by_row}
            options += [name for name, is_on in switches.items() if is_on]
        else:
            chosen = config_named(listed, config)
            options.append(f"--config {shlex.quote(chosen.name)}")
        again = " ".join(["sim", kernel, *options])
        passed = run(listed, chosen, again, settings or (), seeds=seeds, first_seed=first_seed)
    raise typer.Exit(0 if passed else WRONG)


@app.command(epilog=examples("learn", "learn broken", "learn time"))
def learn(what: Annotated[str, typer.Argument(help="run, broken or time; time needs a Hopper GPU")] = "run") -> None:
    """Run the product of docs/learn in the simulator, break it in five ways, or time its steps on a GPU."""
    from . import learn as product
    from .bench.command import UsageError, need_gpu
    from .sim import HostCompileError

    ways = {"run": product.run, "broken": product.show_broken, "time": product.time_steps}
    with refused(UsageError, HostCompileError):
        if what not in ways:
            raise UsageError(f"what: expected one of {', '.join(ways)}, got {what!r}")
        if what == "time":
            need_gpu("learn time", "`learn` and `learn broken`")
        right = ways[what]()
    raise typer.Exit(0 if right else WRONG)


def _stated(
    block_m: int, block_n: int, form: Output, cluster_m: int, cluster_n: int, cluster_k: int, k: int = 0
) -> GemmConfig:
    """Return the configuration of fp8_gemm that the command line states."""
    from deep_gemm.gemm.config.of_tile import tile_config

    config = tile_config(block_m, block_n, form, cluster_m, cluster_n, cluster_k, k)
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"{config.name}: {reason}")
    return config


def _output_of(*, fp32: bool, with_c: bool, adds_to_d: bool, by_row: bool) -> Output:
    """Return the output of fp8_gemm that the command line states."""
    from deep_gemm.core.check.recipes import PER_BLOCK, PER_ROW
    from deep_gemm.gemm.kinds.output import Output

    return Output(is_fp32=fp32, with_c=with_c, adds_to_d=adds_to_d, sfb=PER_ROW if by_row else PER_BLOCK)


@app.command(
    epilog=examples("inspect --block-m 256 --block-n 128", 'inspect gather_weighted --config "weights in bfloat16"')
)
def inspect(
    kernel: KernelName = "fp8_gemm",
    config: ConfigName = None,
    block_m: Annotated[int, typer.Option(help="rows of a tile: 64, 128, 192 or 256")] = 256,
    block_n: Annotated[int, typer.Option(help="columns of a tile: 16 to 256, a multiple of 16")] = 128,
    cluster_m: ClusterM = 1,
    cluster_n: ClusterN = 1,
    cluster_k: ClusterK = 1,
    output: Annotated[OutputName, typer.Option(help="type of D")] = OutputName.BF16,
    with_c: WithC = False,
    adds_to_d: AddsToD = False,
    by_row: ByRow = False,
    odd: Annotated[bool, typer.Option("--odd", help="k is an odd number of blocks of 128")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="the machine code too (needs nvdisasm or cuobjdump)")] = False,
    source: Annotated[
        bool,
        typer.Option(
            "--source",
            help="print its source on one page instead: constants folded, unused code gone. It compiles to as many of "
            "the instructions listed here, in some configurations in another order",
        ),
    ] = False,
) -> None:
    """Compile a kernel for sm_90a and show its resources, instructions and gates. Needs no GPU."""
    from deep_gemm.cli import make_console
    from deep_gemm.core.jit import CompileError

    from .fold import page
    from .inspect import inspect, show
    from .kernels import config_named, kernel_named

    with refused(ValueError):
        listed = kernel_named(kernel)
        if kernel == "fp8_gemm" and config is None:
            is_fp32 = output is OutputName.FP32
            form = _output_of(fp32=is_fp32, with_c=with_c, adds_to_d=adds_to_d, by_row=by_row)
            chosen = _stated(block_m, block_n, form, cluster_m, cluster_n, cluster_k, k=128 if odd else 0)
        else:
            chosen = config_named(listed, config)
        if source:
            typer.echo(page(listed.source, listed.headers(chosen)), nl=False)
            return
    try:
        found = inspect(listed, chosen)
    except CompileError as error:
        typer.echo(f"deep_gemm: {error}", err=True)
        raise typer.Exit(WRONG) from None
    show(found, make_console(), sass=sass)
    raise typer.Exit(0 if found.passed == len(found.verdicts) else WRONG)


@app.command(epilog=examples("configs"))
def configs() -> None:
    """List every configuration that a call can use: of products, dense and grouped, and of all other kernels."""
    from deep_gemm.cli import make_console

    from . import configs as kinds
    from .inspect import show_configs, show_other_configs
    from .kernels import all_kernels

    console = make_console()
    show_configs(
        [
            *kinds.reachable_dense(),
            *kinds.reachable_decode(),
            *kinds.reachable_grouped(),
            *kinds.reachable_silu(),
            *kinds.reachable_k_grouped(),
            *kinds.reachable_heads(),
        ],
        console,
    )
    has_table = ("fp8_gemm", "fp8_gemm_decode")
    show_other_configs([each for name, each in all_kernels().items() if name not in has_table], console)


@app.command(
    epilog=examples(
        "bench dense --quick",
        'bench linear --shapes "1,2112,7168;64,2112,7168" --out result.json',
        "bench compile",
        "bench kernel fp8_gemm --set m=4096 --set n=2112 --set k=7168",
    )
)
def bench(
    kind: Annotated[
        str,
        typer.Argument(
            help="dense, grouped, fp4_dense, fp4_masked, fp4_contiguous, fine_dense, fine_masked, einsum, casts, "
            "linear, rows, experts, fp4_experts, few_experts, bf16_experts, attention, hc, bf16, training, "
            "distributed, host, compile, numerics or kernel"
        ),
    ],
    kernel: Annotated[str | None, typer.Argument(help="after `kernel`, its name; all unless given")] = None,
    config: ConfigName = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="kernel: a field of its trial, such as n=72; a wrong one lists all"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a few typical cases")] = False,
    sustained: Annotated[bool, typer.Option("--sustained", help="also time calls back to back")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw the result into this file")] = None,
    out: Annotated[Path | None, typer.Option(help="result file; else benchmarks/results/kind-date-commit.json")] = None,
    shapes: Annotated[str | None, typer.Option(help="only these shapes: '64,2112,7168;4096,7168,2048'")] = None,
    only: Annotated[str | None, typer.Option(help="only these contenders, as 'deep_gemm,copy'")] = None,
    minutes: Annotated[float | None, typer.Option(help="begin nothing new after this time")] = None,
    processes: Annotated[int | None, typer.Option(help="distributed: how many; one for each GPU unless given")] = None,
    part: Annotated[str | None, typer.Option(help="products: only the 'fitted' or the 'judged' cases")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit to record if git cannot tell")] = None,
) -> None:
    """Measure products, casts and layers beside rivals, or host time, or compile times. Write a file and print tables.

    `bench kernel` times launches of any kernel on a trial's problem, and writes no file.
    """
    from .bench.command import UsageError, need_gpu, run

    if kind == "kernel":
        from .bench import kernel as of_kernels

        with refused(UsageError, ValueError):
            need_gpu("bench kernel")
            right = of_kernels.run(kernel, config, settings or ())
        raise typer.Exit(0 if right else WRONG)
    with refused(UsageError):
        if given := kernel or config or settings:
            raise UsageError(f"kind: expected kernel, because {given} belongs to it, got {kind}")
        right = run(
            kind,
            quick=quick,
            with_sustained=sustained,
            plot=plot,
            out=out,
            shapes=shapes,
            only=only,
            minutes=minutes,
            commit=commit,
            part=part,
            processes=processes,
        )
    raise typer.Exit(0 if right else WRONG)


@app.command(
    epilog=examples(
        "soak --minutes 8", "soak --seed 7 --only fp8_gemm --only einsum", "soak --only kernels --out soak.json"
    )
)
def soak(
    minutes: Annotated[float, typer.Option(min=0, help="begin nothing new after this time")] = 8,
    seed: Annotated[int, typer.Option(help="the seed that all problems are drawn from")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="only this kind of problem; may be repeated")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu, else cuda if there is a Hopper GPU")] = None,
    first: Annotated[int, typer.Option(min=0, help="the number of the first problem")] = 0,
    count: Annotated[int | None, typer.Option(min=1, help="the number of problems, unless time is up first")] = None,
    out: Annotated[Path | None, typer.Option(help="write a record of the run into this file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit to record if git cannot tell")] = None,
) -> None:
    """Run random problems of every kind, bad calls included, and check values, canaries and errors each time.

    `--only kernels` runs each kernel alone, in any configuration; `--only kernel:lay_scales` runs one kernel.
    """
    from .soak.command import run

    with refused(ValueError):
        right = run(minutes, seed, only or (), device, first, count, out, commit)
    raise typer.Exit(0 if right else WRONG)


@app.command(epilog=examples("tune --fit benchmarks/results/tune-h200-2026-11-22-45f5a79.json --out mine.json"))
def tune(
    files: Annotated[list[Path] | None, typer.Argument(help="files of times of tiles, one for each GPU")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="make the constants of the cost model from FILES")] = False,
    out: Annotated[Path | None, typer.Option(help="the constants' file, else the package's own")] = None,
) -> None:
    """Fit the cost model to measured times, and print how good its choices are."""
    from deep_gemm.gemm.choose import timings

    from .bench.command import UsageError
    from .bench.tune_fit import run

    with refused(UsageError):
        run(files or () if fit else (), out or timings.FILE)


@app.command(epilog=examples("plot result.json result.png"))
def plot(
    file: Annotated[Path, typer.Argument(help="a result file of bench")],
    out: Annotated[Path, typer.Argument(help="the picture to write: .png, .svg or .pdf")],
) -> None:
    """Draw a benchmark's result FILE as a picture, OUT."""
    from .bench.command import UsageError, plot_file

    with refused(UsageError, OSError):
        plot_file(file, out)


@app.command(epilog=examples("releases", "releases --install cu13"))
def releases(
    install: Annotated[
        str | None, typer.Option(help="make a test environment of the newest releases, with the extra torch wants")
    ] = None,
) -> None:
    """Ask PyPI whether NVRTC, cuda-bindings, typer, rich or numpy are newer than the versions that passed all tests."""
    from .releases import TRIED, newer_than_tried, on_pypi, try_to_install

    if install is not None:
        typer.echo(try_to_install(install))
        return
    with refused(ValueError):
        found = on_pypi()
    newer = newer_than_tried(found)
    for name, version in found.items():
        typer.echo(
            f"{name} {version}, " + (f"newer than {TRIED[name]}, the last one tried" if name in newer else "tried")
        )
    if newer:
        typer.echo("Try them: CI=1 make test, then tests/lab/compiler_matrix.py; and raise TRIED in lab/releases.py.")
        raise typer.Exit(WRONG)


class Shipped(str, Enum):
    """Allowed values of WHAT for `ship`."""

    KERNELS = "kernels"
    HUB = "hub"


@app.command(epilog=examples("ship kernels dist", "ship kernels dist --model deepseek-v3 --tp 8", "ship hub build/hub"))
def ship(
    what: Annotated[Shipped, typer.Argument(help="a wheel of compiled kernels, or a folder for the kernel hub")],
    out: Annotated[Path, typer.Argument(help="the folder to write it into")],
    model: Annotated[list[str] | None, typer.Option(help="a model, as `compile` takes it; all unless given")] = None,
    tp: Annotated[list[int] | None, typer.Option(help="ranks that share a model; 1, 2, 4 and 8 unless given")] = None,
    gpu: Annotated[list[str] | None, typer.Option(help="H200, H100 or H20; all unless given")] = None,
    max_tokens: Annotated[int, typer.Option(help="tokens of the largest batch")] = 1 << 16,
) -> None:
    """Make a wheel of compiled kernels, or a folder for the kernel hub: a release ships both beside the package."""
    from deep_gemm.cli import make_console
    from deep_gemm.cli.models import MODELS
    from deep_gemm.core.gpu import GPUS

    from .ship import hub, kernels

    gpus = gpu or [each.name for each in GPUS]
    with refused(ValueError, OSError):
        if what is Shipped.HUB:
            made: Path | None = hub(out)
        else:
            made = kernels(out, model or list(MODELS), tp or [1, 2, 4, 8], gpus, max_tokens, make_console())
    if made is not None:
        typer.echo(made)
    raise typer.Exit(WRONG if made is None else 0)


@app.command(epilog=examples("engines", "engines vllm==0.33.0 sglang==0.5.23", "engines --table", "engines --ran"))
def engines(
    releases: Annotated[
        list[str] | None, typer.Argument(help="wheels, or releases that pip downloads; each newest unless given")
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="print the table of calls in docs/engines.md instead")] = False,
    ran: Annotated[bool, typer.Option("--ran", help="print that page's table of runs on GPUs instead")] = False,
) -> None:
    """List the names and keywords of deep_gemm that engines use and that this package lacks.

    For engines with a plugin, also list functions that have changed since the plugin was written.
    """
    from .engines.forms import lacking
    from .engines.forms import table as table_of_calls
    from .engines.places import changed
    from .engines.ran import ran as table_of_runs
    from .engines.wheels import NEWEST, uses_in_wheel, wheel_of

    if ran:
        typer.echo(table_of_runs(), nl=False)
        return
    if table:
        typer.echo(table_of_calls(), nl=False)
        return
    found = False
    for release in releases or NEWEST:
        with refused(ValueError), wheel_of(release) as wheel:
            name, uses, others = wheel.name, uses_in_wheel(wheel), changed(wheel)
        absent = lacking(uses)
        found = found or bool(absent or others)
        typer.echo(f"{name}: {len(uses)} names, " + ("all of them known" if not absent else "unknown:"))
        typer.echo("".join(f"  {each}\n" for each in absent), nl=False)
        if others is not None:
            typer.echo("  the plugin's places " + ("are as it knows them" if not others else "are others:"))
            typer.echo("".join(f"    {each}\n" for each in others), nl=False)
    raise typer.Exit(WRONG if found else 0)


def main() -> None:
    """Run the command line."""
    app(prog_name="lab")


if __name__ == "__main__":
    main()
