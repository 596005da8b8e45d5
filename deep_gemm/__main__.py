"""The command line: `python -m deep_gemm`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

WRONG, MISUSED = 1, 2
"""Exit codes: 1 if a check or a step failed, 2 if the request cannot be carried out, 0 otherwise."""


def examples(*lines: str, program: str = "deep_gemm") -> str:
    """Write the examples at the end of a command's help. Blank lines keep Typer from joining the lines."""
    return "\n\n".join(["Examples:", *(f"  python -m {program} {line}" for line in lines)])


@contextmanager
def refused(*errors: type[Exception]) -> Iterator[None]:
    """If one of these errors is raised, print its text and end the command: the request cannot be carried out."""
    try:
        yield
    except errors as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        typer.echo(f"deep_gemm: {text}", err=True)
        raise typer.Exit(MISUSED) from None


class Commands(TyperGroup):
    """Commands that end with one sentence, not a traceback, if the environment or the installation is wrong."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except typer.Exit:
            raise
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            from .compat.installed import WITHOUT_TORCH

            typer.echo(WITHOUT_TORCH, err=True)
            raise typer.Exit(MISUSED) from None
        except (RuntimeError, ValueError) as error:
            from .core.jit import CompilerMissing
            from .core.settings import SettingError

            if not isinstance(error, (CompilerMissing, SettingError)):
                raise
            typer.echo(f"deep_gemm: {error}", err=True)
            raise typer.Exit(MISUSED) from None


app = typer.Typer(
    cls=Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich"
)
cache_app = typer.Typer(no_args_is_help=True, help="List, check, clear, export or import the compiled kernels.")
app.add_typer(cache_app, name="cache", epilog=examples("cache list", "cache verify", "cache export kernels.tar"))


def _show_version(is_asked_for: bool) -> None:
    if is_asked_for:
        from . import __version__

        typer.echo(f"deep_gemm {__version__}")
        raise typer.Exit


@app.callback(
    epilog=examples("doctor", "demo", "explain 4096 7168 2048", "compile 2112,7168", "cache list")
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
    """Show in ten lines what this machine can run, which software was found, and how to get more."""
    from .compat import installed

    if installed.changed():  # then further modules may be missing, or be another distribution's
        for sentence in installed.to_mend():
            typer.echo(f"deep_gemm: {sentence}")
        raise typer.Exit(WRONG)

    from .cli.doctor import examine

    findings = examine()
    for finding in findings:
        typer.echo(str(finding))
    raise typer.Exit(WRONG if findings[-1].is_wrong else 0)


@app.command(epilog=examples("demo"))
def demo() -> None:
    """Quantize random data, run every product and layer, and check each against FP64. On a GPU, show speed too."""
    from .cli.demo import run

    raise typer.Exit(0 if run() else WRONG)


OutputName = Enum("OutputName", {"BF16": "bf16", "FP32": "fp32"})
GroupsName = Enum(
    "GroupsName", {"IDS": "ids", "ENDS": "ends", "COUNTS": "counts", "DEPTHS": "depths", "HEADS": "heads"}
)
FormName = Enum("FormName", {"PUBLISHED": "published", "ROWS": "rows", "BF16": "bf16"})
"""The values of --output, --groups and --form."""

OutputOption = Annotated[OutputName | None, typer.Option(help="type of D: bf16, or fp32 with --by-row")]
Fp32Option = Annotated[bool, typer.Option("--fp32", help="short for --output fp32")]
WithCOption = Annotated[bool, typer.Option("--with-c", help="C is read and added")]
AccumulateOption = Annotated[bool, typer.Option("--accumulate", help="C is D itself")]
ByRowOption = Annotated[bool, typer.Option("--by-row", help="B has a scale for each row and 128 columns")]
RowScalesOption = Annotated[bool, typer.Option("--row-scales", help="A and B have a scale for each whole row")]
Fp4Option = Annotated[bool, typer.Option("--fp4", help="B is FP4 (MXFP4)")]
GroupsOption = Annotated[
    GroupsName | None, typer.Option(help="rows grouped by ids, ends, counts; depths along k; heads")
]
NumGroupsOption = Annotated[int, typer.Option(help="number of groups")]
GpuOption = Annotated[str | None, typer.Option(help="H200, H100 or H20; without it, this machine's GPU, or H200")]
"""Options of `explain` and `compile` that describe a product."""


@app.command(
    epilog=examples(
        "explain 4096 7168 2048",
        "explain 2048 4096 7168 --groups ids --num-groups 32 --gpu H100",
        "explain 16 4096 7168 --fp4",
    )
)
def explain(
    m: Annotated[
        int, typer.Argument(help="rows of D: of all groups by ids or ends, of each head, of a usual group by counts")
    ],
    n: Annotated[int, typer.Argument(help="columns of D")],
    k: Annotated[int, typer.Argument(help="depth; of an average group for depths along k")],
    output: OutputOption = None,
    fp32: Fp32Option = False,
    with_c: WithCOption = False,
    accumulate: AccumulateOption = False,
    by_row: ByRowOption = False,
    row_scales: RowScalesOption = False,
    fp4: Fp4Option = False,
    groups: GroupsOption = None,
    num_groups: NumGroupsOption = 1,
    gpu: GpuOption = None,
) -> None:
    """Show the kernel that a product of these sizes runs, the other candidates, and why they lost."""
    import torch

    from .gemm.explain import explain

    dtypes = {OutputName.BF16: torch.bfloat16, OutputName.FP32: torch.float32, None: None}
    with refused(ValueError, NotImplementedError):
        explain(
            m,
            n,
            k,
            dtypes[OutputName.FP32 if fp32 else output],
            with_c=with_c,
            accumulate=accumulate,
            recipe=(1, 1, 128) if by_row else None,
            recipe_a=(1, 0) if row_scales else None,
            recipe_b=(1, 0) if row_scales else None,
            groups=None if groups is None else groups.value,
            num_groups=num_groups,
            gpu=gpu,
            fp4=fp4,
        )


@app.command(
    "compile",
    epilog=examples(
        "compile 2112,7168 7168,2048 --layers",
        "compile 64,2112,7168 --fp32 --gpu H100",
        "compile 4096,7168 --groups ids --num-groups 32",
        "compile --model deepseek-v3 --tp 8",
        "compile --model qwen3-235b --tp 4 --ep 4 --max-tokens 8192 --list",
        "compile --model qwen3-30b-a3b --form rows",
    )
    + "\n\nA machine with a GPU finds these kernels if it reads the same directory (DG_JIT_CACHE_DIR) and has the same "
    "version of this package and the same build of NVRTC.",
)
def compile_shapes(
    shapes: Annotated[
        list[str] | None, typer.Argument(help="products as m,n,k, or weights as n,k for any m (see `explain`)")
    ] = None,
    output: OutputOption = None,
    fp32: Fp32Option = False,
    with_c: WithCOption = False,
    accumulate: AccumulateOption = False,
    by_row: ByRowOption = False,
    row_scales: RowScalesOption = False,
    fp4: Fp4Option = False,
    groups: GroupsOption = None,
    num_groups: NumGroupsOption = 1,
    gpu: GpuOption = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="also casts, routes, scales and sums, and kernels of `linear` for few rows")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="all kernels of a model, such as deepseek-v3; a wrong name lists all models")
    ] = None,
    tp: Annotated[int, typer.Option(help="ranks that share each of the model's weights")] = 1,
    ep: Annotated[int, typer.Option(help="ranks that share the model's experts")] = 1,
    form: Annotated[FormName, typer.Option(help="weights: as published, by rows or bf16")] = FormName.PUBLISHED,
    max_tokens: Annotated[int, typer.Option(help="tokens of the largest batch")] = 1 << 16,
    only_list: Annotated[bool, typer.Option("--list", help="list the kernels, compile nothing")] = False,
) -> None:
    """Compile the kernels of these shapes into the cache, before a program needs them. This needs no GPU."""
    import torch

    from .cli import make_console, precompile
    from .gemm.explain import asked

    dtypes = {OutputName.BF16: torch.bfloat16, OutputName.FP32: torch.float32, None: None}
    dtype, of_rows = dtypes[OutputName.FP32 if fp32 else output], (1, 0) if row_scales else None
    recipes = (1, 1, 128) if by_row else None, of_rows, of_rows
    with refused(ValueError, NotImplementedError):
        if not shapes and not layers and not model:
            raise ValueError("shapes: expected shapes, --model or --layers, got none")
        options = {"tp": (tp, 1), "ep": (ep, 1), "max-tokens": (max_tokens, 1 << 16), "form": (form.value, "published")}
        for name, (number, unless_given) in options.items():
            if number != unless_given and not model:
                raise ValueError(f"{name}: expected --model too, as shapes are of one rank, got only {number}")
        jobs = [("layers", job) for job in precompile.jobs_of_layers()] if layers else []
        if model:
            jobs += precompile.jobs_of_model(model, tp=tp, ep=ep, max_tokens=max_tokens, gpu=gpu, form=form.value)
        for shape in shapes or ():
            m, n, k = precompile.parsed(shape)
            kind = None if groups is None else groups.value
            question = asked(m or num_groups, n, k, dtype, with_c, accumulate, recipes, kind, num_groups, gpu, fp4)
            jobs += ((shape, job) for job in precompile.jobs_of(question, any_m=m is None, with_layers=layers))
        if only_list:
            precompile.show(jobs, make_console())
            raise typer.Exit(0)
        is_ready = precompile.run([job for _, job in jobs], make_console())
    raise typer.Exit(0 if is_ready else WRONG)


@cache_app.command("list", epilog=examples("cache list"))
def list_cache() -> None:
    """List the compiled kernels in the cache, the newest first."""
    from .cli import cache, make_console
    from .core.jit import directories

    for directory in directories():
        cache.show(directory, make_console())


@cache_app.command("verify", epilog=examples("cache verify", "cache verify --remove"))
def verify_cache(
    remove: Annotated[bool, typer.Option("--remove", help="remove kernels that are not sound")] = False,
) -> None:
    """Check the digest and the name of every kernel in the cache. A kernel that is not sound is compiled again."""
    from .cli import cache, make_console
    from .core.jit import directories

    is_sound = [cache.verify(directory, make_console(), remove=remove) for directory in directories()]
    raise typer.Exit(0 if all(is_sound) else WRONG)


@cache_app.command("clear", epilog=examples("cache clear", "cache clear --yes"))
def clear_cache(yes: Annotated[bool, typer.Option("--yes", help="do not ask first")] = False) -> None:
    """Remove every kernel in the cache, and its dumps, bad files and failed sources. Other files stay.

    Of several directories, only the directory that is written is cleared.
    """
    from .cli.cache import clear
    from .core.jit.cache import written_directory
    from .core.settings import settings

    directory = written_directory(settings().jit_cache_dirs)
    if not yes and not typer.confirm(f"Remove all kernels from {directory}?"):
        raise typer.Exit(WRONG)
    typer.echo(f"{clear(directory)} kernels removed from {directory}")


@cache_app.command("export", epilog=examples("cache export kernels.tar"))
def export_cache(file: Annotated[Path, typer.Argument(help="the archive to write, a tar of kernels")]) -> None:
    """Write all kernels in the cache to FILE, for other machines and for container images."""
    from .cli import cache, make_console
    from .core.jit import directories

    with refused(OSError):
        has_some = cache.export_to(file, directories(), make_console())
    raise typer.Exit(0 if has_some else WRONG)


@cache_app.command("import", epilog=examples("cache import kernels.tar"))
def import_cache(file: Annotated[Path, typer.Argument(help="an archive that `cache export` wrote")]) -> None:
    """Add the kernels in FILE to the cache. A member that is not a kernel, or not sound, is refused."""
    from .cli import cache, make_console
    from .core.jit.cache import written_directory
    from .core.settings import settings

    with refused(OSError, ValueError):
        is_sound = cache.import_from(file, written_directory(settings().jit_cache_dirs), make_console())
    raise typer.Exit(0 if is_sound else WRONG)


def _moved(name: str) -> Callable[[], None]:
    def command() -> None:
        typer.echo(
            f"deep_gemm: {name} is now a command of the laboratory, beside the package. In a checkout: "
            f"python -m lab {name}",
            err=True,
        )
        raise typer.Exit(MISUSED)

    return command


for _name in ("bench", "configs", "inspect", "plot", "sim", "soak", "tune"):
    # Accept any arguments, so that the user reads this sentence, not an error about an option.
    _anything = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(_name, hidden=True, context_settings=_anything)(_moved(_name))


def main() -> None:
    """Run the command line."""
    app(prog_name="deep_gemm")


if __name__ == "__main__":
    main()
