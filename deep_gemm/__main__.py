"""The command line: `python -m deep_gemm`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

WRONG, MISUSED = 1, 2
"""Exit codes: something was found wrong, or failed; a request that cannot be carried out. 0 is all else."""


def examples(*lines: str) -> str:
    """Give the end of a command's help. Blank lines keep Typer from joining the others."""
    return "\n\n".join(["Examples:", *(f"  python -m deep_gemm {line}" for line in lines)])


class Commands(TyperGroup):
    """Commands that end in a sentence where the environment or the installation is at fault."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except typer.Exit:
            raise
        except (RuntimeError, ValueError) as error:
            from .jit import CompilerMissing
            from .settings import SettingError

            if not isinstance(error, (CompilerMissing, SettingError)):
                raise
            typer.echo(f"deep_gemm: {error}", err=True)
            raise typer.Exit(MISUSED) from None


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
cache_app = typer.Typer(no_args_is_help=True, help="List, check, clear, export or import the compiled kernels.")
app.add_typer(cache_app, name="cache", epilog=examples("cache list", "cache verify", "cache export kernels.tar"))


def _show_version(is_asked_for: bool) -> None:
    if is_asked_for:
        from . import __version__

        typer.echo(f"deep_gemm {__version__}")
        raise typer.Exit


@app.callback(
    epilog=examples(
        "doctor", "demo", "explain 4096 7168 2048", "compile 2112,7168", "bench dense --quick", "sim --seeds 4"
    )
    + "\n\nExit codes: 0 all right; 1 something failed or was found wrong; 2 the request cannot be carried out."
)
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """FP8 matrix products with fine-grained scaling for NVIDIA Hopper."""


@app.command(epilog=examples("doctor"))
def doctor() -> None:
    """Say in ten lines what this machine can run, what was found for it, and what to do for more."""
    from .compat import installed

    if installed.changed():  # then what else is looked at may be somebody else's, or gone
        for sentence in installed.to_mend():
            typer.echo(f"deep_gemm: {sentence}")
        raise typer.Exit(WRONG)

    from .tools.doctor import examine

    findings = examine()
    for finding in findings:
        typer.echo(str(finding))
    raise typer.Exit(WRONG if findings[-1].is_wrong else 0)


@app.command(epilog=examples("demo"))
def demo() -> None:
    """Quantize random data, run every product and layer, and check each against FP64. On a GPU, show speed too."""
    from .tools.demo import run

    raise typer.Exit(0 if run() else WRONG)


@app.command(epilog=examples("sim --seeds 4", "sim --m 40 --n 72 --k 272 --block-m 64 --block-n 64 --fp32 --adds-to-d"))
def sim(
    kernel: Annotated[str, typer.Argument(help="the kernel: fp8_gemm, or hc_prenorm with n up to 32")] = "fp8_gemm",
    m: Annotated[int, typer.Option("--m", min=1, help="rows of A and D")] = 200,
    n: Annotated[int, typer.Option("--n", min=1, help="rows of B, columns of D")] = 336,
    k: Annotated[int, typer.Option("--k", min=1, help="columns of A and B")] = 896,
    seeds: Annotated[int, typer.Option(min=1, help="number of schedules to try, each drawn from a seed")] = 8,
    first_seed: Annotated[int, typer.Option(min=0, help="the first seed")] = 0,
    num_sms: Annotated[int, typer.Option(min=1, help="SMs to simulate")] = 2,
    block_m: Annotated[int, typer.Option(help="rows of a tile")] = 128,
    block_n: Annotated[int, typer.Option(help="columns of a tile")] = 128,
    cluster_m: Annotated[int, typer.Option(help="2: pairs of CTAs share B")] = 1,
    cluster_n: Annotated[int, typer.Option(help="2: pairs of CTAs share A")] = 1,
    cluster_k: Annotated[int, typer.Option(help="2 to 8: this many CTAs split k")] = 1,
    fp32: Annotated[bool, typer.Option("--fp32", help="FP32 output")] = False,
    with_c: Annotated[bool, typer.Option("--with-c", help="read C and add it")] = False,
    adds_to_d: Annotated[bool, typer.Option("--adds-to-d", help="add to D in place (FP32)")] = False,
    by_row: Annotated[bool, typer.Option("--by-row", help="B has a scale for each row and 128 columns")] = False,
) -> None:
    """Run a kernel's own source on a simulated GPU, under many schedules (needs g++)."""
    if kernel not in ("fp8_gemm", "hc_prenorm"):
        raise typer.BadParameter(f"expected fp8_gemm or hc_prenorm, got {kernel}", param_hint="kernel")

    from .choose.config_hc_prenorm import HcConfig
    from .choose.config_hc_prenorm_few import TILE_ROWS, HcFewConfig
    from .choose.config_of_tile import tile_config
    from .choose.output import Output
    from .sim import HostCompileError
    from .sim.command import run, run_hc

    how = {"seeds": seeds, "first_seed": first_seed, "num_sms": num_sms}
    try:
        if kernel == "hc_prenorm":
            few = HcFewConfig(n, cluster_k)
            raise typer.Exit(
                0 if run_hc(few if block_m == TILE_ROWS else HcConfig(block_m, n, cluster_k), m, n, k, **how) else WRONG
            )
        output = Output(fp32, with_c, adds_to_d, by_row)
        config = tile_config(block_m, block_n, output, cluster_m, cluster_n, cluster_k, k)
        passed = run(config, m, n, k, **how)
    except (ValueError, HostCompileError) as error:
        typer.echo(f"deep_gemm: {error}", err=True)
        raise typer.Exit(MISUSED) from None
    raise typer.Exit(0 if passed else WRONG)


class OutputName(str, Enum):
    """Values of --output."""

    BF16 = "bf16"
    FP32 = "fp32"


@app.command(
    epilog=examples("inspect --block-m 256 --block-n 128", 'inspect gather_weighted --config "weights in bfloat16"')
)
def inspect(
    kernel: Annotated[str, typer.Argument(help="the kernel: fp8_gemm, or one of casts, routes or scales")] = "fp8_gemm",
    config: Annotated[
        str | None, typer.Option(help="of another kernel than fp8_gemm, a configuration as `configs` names it")
    ] = None,
    block_m: Annotated[int, typer.Option(help="rows of a tile: 64, 128, 192 or 256")] = 256,
    block_n: Annotated[int, typer.Option(help="columns of a tile: 16 to 256, a multiple of 16")] = 128,
    cluster_m: Annotated[int, typer.Option(help="2: pairs of CTAs share B")] = 1,
    cluster_n: Annotated[int, typer.Option(help="2: pairs of CTAs share A")] = 1,
    cluster_k: Annotated[int, typer.Option(help="2 to 8: this many CTAs split k")] = 1,
    output: Annotated[OutputName, typer.Option(help="type of D")] = OutputName.BF16,
    with_c: Annotated[bool, typer.Option("--with-c", help="read C and add it")] = False,
    adds_to_d: Annotated[bool, typer.Option("--adds-to-d", help="add to D in place (FP32)")] = False,
    by_row: Annotated[bool, typer.Option("--by-row", help="B has a scale for each row and 128 columns")] = False,
    odd: Annotated[bool, typer.Option("--odd", help="k is an odd number of blocks of 128")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="the machine code too (needs nvdisasm or cuobjdump)")] = False,
) -> None:
    """Compile a kernel for sm_90a and show its resources, instructions and gates. Needs no GPU."""
    from .benchmark.table import make_console
    from .choose.config_of_tile import tile_config
    from .choose.output import Output
    from .jit import CompileError
    from .kernels.ordinary import named
    from .tools.inspect import inspect, inspect_ordinary, show

    try:
        if kernel == "fp8_gemm":
            if config is not None:
                raise ValueError(f"config: expected none for fp8_gemm, whose tile is stated, got {config!r}")
            form = Output(output is OutputName.FP32, with_c, adds_to_d, by_row)
            found = inspect(tile_config(block_m, block_n, form, cluster_m, cluster_n, cluster_k, k=128 if odd else 0))
        else:
            found = inspect_ordinary(*named(kernel, config))
    except ValueError as error:
        typer.echo(f"deep_gemm: {error}", err=True)
        raise typer.Exit(MISUSED) from None
    except CompileError as error:
        typer.echo(f"deep_gemm: {error}", err=True)
        raise typer.Exit(WRONG) from None
    show(found, make_console(), sass=sass)
    raise typer.Exit(0 if found.passed == len(found.verdicts) else WRONG)


class GroupsName(str, Enum):
    """Values of --groups."""

    IDS = "ids"
    ENDS = "ends"
    COUNTS = "counts"
    DEPTHS = "depths"
    HEADS = "heads"


@app.command(
    epilog=examples("explain 4096 7168 2048", "explain 2048 4096 7168 --groups ids --num-groups 32 --gpu H100")
)
def explain(
    m: Annotated[
        int, typer.Argument(help="rows of D: of all groups by ids or ends, of each head, of about each group by counts")
    ],
    n: Annotated[int, typer.Argument(help="columns of D")],
    k: Annotated[int, typer.Argument(help="depth; of the average group along k")],
    output: Annotated[OutputName | None, typer.Option(help="type of D: bf16, or fp32 with --by-row")] = None,
    fp32: Annotated[bool, typer.Option("--fp32", help="short for --output fp32")] = False,
    with_c: Annotated[bool, typer.Option("--with-c", help="C is read and added")] = False,
    accumulate: Annotated[bool, typer.Option("--accumulate", help="C is D itself")] = False,
    by_row: Annotated[bool, typer.Option("--by-row", help="B has a scale for each row and 128 columns")] = False,
    groups: Annotated[
        GroupsName | None, typer.Option(help="rows grouped by ids, ends, counts; depths along k; heads")
    ] = None,
    num_groups: Annotated[int, typer.Option(help="how many groups")] = 1,
    gpu: Annotated[str | None, typer.Option(help="H200, H100 or H20, else the one that there is")] = None,
) -> None:
    """Show what a product of these sizes runs, what else there is for it, and why that lost."""
    import torch

    from .choose.explain import explain

    dtypes = {OutputName.BF16: torch.bfloat16, OutputName.FP32: torch.float32, None: None}
    try:
        explain(
            m,
            n,
            k,
            dtypes[OutputName.FP32 if fp32 else output],
            with_c=with_c,
            accumulate=accumulate,
            recipe=(1, 1, 128) if by_row else None,
            groups=None if groups is None else groups.value,
            num_groups=num_groups,
            gpu=gpu,
        )
    except ValueError as error:
        typer.echo(f"deep_gemm: {error}", err=True)
        raise typer.Exit(MISUSED) from None


@app.command(
    "compile",
    epilog=examples(
        "compile 2112,7168 7168,2048 --layers",
        "compile 64,2112,7168 --fp32 --gpu H100",
        "compile 4096,7168 --groups ids --num-groups 32",
        "compile --model deepseek-v3 --tp 8",
        "compile --model qwen3-235b --tp 4 --ep 4 --max-tokens 8192 --list",
    )
    + "\n\nA GPU's machine finds these kernels if it reads the same directory (DG_JIT_CACHE_DIR), and has the same "
    "version of this package and the same build of NVRTC.",
)
def compile_shapes(
    shapes: Annotated[
        list[str] | None, typer.Argument(help="products as m,n,k, or weights as n,k for any m; as `explain` takes them")
    ] = None,
    output: Annotated[OutputName | None, typer.Option(help="type of D: bf16, or fp32 with --by-row")] = None,
    fp32: Annotated[bool, typer.Option("--fp32", help="short for --output fp32")] = False,
    with_c: Annotated[bool, typer.Option("--with-c", help="C is read and added")] = False,
    accumulate: Annotated[bool, typer.Option("--accumulate", help="C is D itself")] = False,
    by_row: Annotated[bool, typer.Option("--by-row", help="B has a scale for each row and 128 columns")] = False,
    groups: Annotated[
        GroupsName | None, typer.Option(help="rows grouped by ids, ends, counts; depths along k; heads")
    ] = None,
    num_groups: Annotated[int, typer.Option(help="how many groups")] = 1,
    gpu: Annotated[str | None, typer.Option(help="H200, H100 or H20, else the one that there is")] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="casts, routes, scales and sums too, and what `linear` runs for few rows")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="all that a model needs, such as deepseek-v3; a wrong name lists all")
    ] = None,
    tp: Annotated[int, typer.Option(help="ranks that share each of the model's weights")] = 1,
    ep: Annotated[int, typer.Option(help="ranks that share its experts")] = 1,
    max_tokens: Annotated[int, typer.Option(help="tokens of its largest batch")] = 1 << 16,
    only_list: Annotated[bool, typer.Option("--list", help="list the kernels, compile nothing")] = False,
) -> None:
    """Compile the kernels of these shapes into the cache, before a program needs them. Needs no GPU."""
    import torch

    from .benchmark.table import make_console
    from .choose.explain import asked
    from .tools import precompile

    dtypes = {OutputName.BF16: torch.bfloat16, OutputName.FP32: torch.float32, None: None}
    dtype, recipe = dtypes[OutputName.FP32 if fp32 else output], (1, 1, 128) if by_row else None
    try:
        if not shapes and not layers and not model:
            raise ValueError("shapes: expected some, --model or --layers, got none")
        jobs = [("layers", job) for job in precompile.jobs_of_layers()] if layers else []
        if model:
            jobs += precompile.jobs_of_model(model, tp=tp, ep=ep, max_tokens=max_tokens, gpu=gpu)
        for shape in shapes or ():
            m, n, k = precompile.parsed(shape)
            kind = None if groups is None else groups.value
            question = asked(m or num_groups, n, k, dtype, with_c, accumulate, recipe, kind, num_groups, gpu)
            jobs += ((shape, job) for job in precompile.jobs_of(question, any_m=m is None, with_layers=layers))
        if only_list:
            precompile.show(jobs, make_console())
            raise typer.Exit(0)
        is_ready = precompile.run([job for _, job in jobs], make_console())
    except ValueError as error:
        typer.echo(f"deep_gemm: {error}", err=True)
        raise typer.Exit(MISUSED) from None
    raise typer.Exit(0 if is_ready else WRONG)


@cache_app.command("list", epilog=examples("cache list"))
def list_cache() -> None:
    """List the compiled kernels that are kept, the newest first."""
    from .benchmark.table import make_console
    from .settings import settings
    from .tools.cache import show

    for directory in settings().jit_cache_dirs:
        show(directory, make_console())


@cache_app.command("verify", epilog=examples("cache verify", "cache verify --remove"))
def verify_cache(
    remove: Annotated[bool, typer.Option("--remove", help="remove those that are not sound")] = False,
) -> None:
    """Check the digest and the name of every kernel that is kept. One that is not sound is only compiled anew."""
    from .benchmark.table import make_console
    from .settings import settings
    from .tools.cache import verify

    console = make_console()
    is_sound = [verify(directory, console, remove=remove) for directory in settings().jit_cache_dirs]
    raise typer.Exit(0 if all(is_sound) else WRONG)


@cache_app.command("clear", epilog=examples("cache clear", "cache clear --yes"))
def clear_cache(
    yes: Annotated[bool, typer.Option("--yes", help="without asking")] = False,
) -> None:
    """Remove every kernel that is kept, dumps, bad files and failed sources too. Other files stay.

    Of several directories only the one that is written is cleared.
    """
    from .jit.cache import written_directory
    from .settings import settings
    from .tools.cache import clear

    directory = written_directory(settings().jit_cache_dirs)
    if not yes and not typer.confirm(f"Remove all kernels from {directory}?"):
        raise typer.Exit(WRONG)
    typer.echo(f"{clear(directory)} kernels removed from {directory}")


@cache_app.command("export", epilog=examples("cache export kernels.tar"))
def export_cache(file: Annotated[Path, typer.Argument(help="the archive to write, a tar of kernels")]) -> None:
    """Write all kernels that are kept into FILE, for other machines and for container images."""
    from .benchmark.table import make_console
    from .settings import settings
    from .tools.cache import export_to

    try:
        has_some = export_to(file, settings().jit_cache_dirs, make_console())
    except OSError as error:
        typer.echo(f"deep_gemm: {error}", err=True)
        raise typer.Exit(MISUSED) from None
    raise typer.Exit(0 if has_some else WRONG)


@cache_app.command("import", epilog=examples("cache import kernels.tar"))
def import_cache(file: Annotated[Path, typer.Argument(help="an archive that `cache export` wrote")]) -> None:
    """Take the kernels in FILE into the directory of kernels. What is not a kernel, or not sound, is refused."""
    import tarfile

    from .benchmark.table import make_console
    from .jit.cache import written_directory
    from .settings import settings
    from .tools.cache import import_from

    try:
        is_sound = import_from(file, written_directory(settings().jit_cache_dirs), make_console())
    except (OSError, ValueError, tarfile.TarError) as error:
        typer.echo(f"deep_gemm: {error}", err=True)
        raise typer.Exit(MISUSED) from None
    raise typer.Exit(0 if is_sound else WRONG)


@app.command(epilog=examples("configs"))
def configs() -> None:
    """List every configuration that can be chosen: of products, dense and grouped, and of all other kernels."""
    from .benchmark.table import make_console
    from .choose.dense import reachable, reachable_decode
    from .choose.depths import reachable_k_grouped
    from .choose.heads import reachable_heads, reachable_heads_decode
    from .choose.rows import reachable_grouped, reachable_silu
    from .kernels.ordinary import reachable_ordinary
    from .tools.inspect import show_configs, show_ordinary_configs

    console = make_console()
    show_configs(
        [
            *reachable(),
            *reachable_decode(),
            *reachable_grouped(),
            *reachable_silu(),
            *reachable_k_grouped(),
            *reachable_heads(),
            *reachable_heads_decode(),
        ],
        console,
    )
    show_ordinary_configs(reachable_ordinary(), console)


@app.command(
    epilog=examples(
        "bench dense --quick", 'bench linear --shapes "1,2112,7168;64,2112,7168" --out result.json', "bench compile"
    )
)
def bench(
    kind: Annotated[
        str,
        typer.Argument(
            help="dense, grouped, einsum, casts, linear, experts, attention, hc, bf16, distributed, host, "
            "compile or numerics"
        ),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="a few typical cases")] = False,
    sustained: Annotated[bool, typer.Option("--sustained", help="also time calls back to back")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw the result into this file")] = None,
    out: Annotated[Path | None, typer.Option(help="result file; else benchmarks/results/kind-date-commit.json")] = None,
    shapes: Annotated[str | None, typer.Option(help="only these shapes: '64,2112,7168;4096,7168,2048'")] = None,
    only: Annotated[str | None, typer.Option(help="only these contenders, as 'deep_gemm,copy'")] = None,
    minutes: Annotated[float | None, typer.Option(help="begin nothing new after this time")] = None,
    processes: Annotated[int | None, typer.Option(help="distributed: how many; one for each GPU unless given")] = None,
    part: Annotated[str | None, typer.Option(help="dense, grouped: only what is 'fitted', or 'judged'")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit to record if git cannot tell")] = None,
) -> None:
    """Measure products, casts and layers beside rivals, host time, or compile times. Write a file and print tables."""
    from .benchmark.command import UsageError, run

    try:
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
    except UsageError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(MISUSED) from None
    raise typer.Exit(0 if right else WRONG)


@app.command(epilog=examples("soak --minutes 8", "soak --seed 7 --only fp8_gemm --only einsum --out soak.json"))
def soak(
    minutes: Annotated[float, typer.Option(min=0, help="begin nothing new after this time")] = 8,
    seed: Annotated[int, typer.Option(help="what all problems follow from")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="this kind of problem alone; may be said again")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu, else cuda if there is a Hopper GPU")] = None,
    first: Annotated[int, typer.Option(min=0, help="the number of the first problem")] = 0,
    count: Annotated[int | None, typer.Option(min=1, help="how many problems, if time does not end it")] = None,
    out: Annotated[Path | None, typer.Option(help="write a record of it into this file")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit to record if git cannot tell")] = None,
) -> None:
    """Run random problems of everything, bad calls among them, and check values, canaries and errors each time."""
    from .soak.command import run

    try:
        right = run(minutes, seed, only or (), device, first, count, out, commit)
    except ValueError as error:
        typer.echo(f"deep_gemm: {error}", err=True)
        raise typer.Exit(MISUSED) from None
    raise typer.Exit(0 if right else WRONG)


@app.command(epilog=examples('tune --shapes "64,2112,7168;4096,7168,2048" --out tuned.json', "tune --audit"))
def tune(
    files: Annotated[list[Path] | None, typer.Argument(help="with --fit, result files of --collect")] = None,
    audit: Annotated[bool, typer.Option("--audit", help="all shapes of the benchmark and 50 at random")] = False,
    collect: Annotated[bool, typer.Option("--collect", help="time what a fit of the cost model needs")] = False,
    minutes: Annotated[float | None, typer.Option(help="with --collect, how long to measure: 4 unless given")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="make the constants of the cost model from FILES")] = False,
    shapes: Annotated[str | None, typer.Option(help="these, such as '64,2112,7168;4096,7168,2048'")] = None,
    output: Annotated[
        str | None, typer.Option(help="with --shapes, what D is: bf16, fp32, bf16+c, '1d1d fp32+d'")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="the result file of --audit or --collect, the table to extend, the constants of --fit"),
    ] = None,
    part: Annotated[str | None, typer.Option(help="with --audit, only what is 'fitted', or 'judged'")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit to record where git cannot tell")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="a line for each shape as it is measured")] = False,
) -> None:
    """Time tiles: audit what is chosen, tabulate what is faster for some shapes, collect times, or fit the model."""
    from .benchmark.command import UsageError
    from .benchmark.tune_command import run

    try:
        right = run(
            audit=audit,
            collect=collect,
            minutes=minutes,
            fit=fit,
            files=files or (),
            shapes=shapes,
            output=output,
            out=out,
            part=part,
            commit=commit,
            verbose=verbose,
        )
    except UsageError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(MISUSED) from None
    raise typer.Exit(0 if right else WRONG)


@app.command(epilog=examples("plot result.json result.png"))
def plot(
    file: Annotated[Path, typer.Argument(help="a result file of bench")],
    out: Annotated[Path, typer.Argument(help="the picture to write: .png, .svg or .pdf")],
) -> None:
    """Draw a benchmark's result FILE as a picture, OUT."""
    from .benchmark.command import UsageError, plot_file

    try:
        plot_file(file, out)
    except UsageError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(MISUSED) from None


def main() -> None:
    """Run the command line."""
    app(prog_name="deep_gemm")


if __name__ == "__main__":
    main()
