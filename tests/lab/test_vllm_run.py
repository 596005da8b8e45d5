"""The runner of vLLM, all of it that needs neither vLLM nor a GPU."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import sys
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import deep_gemm
from lab.bench import machine
from lab.engines import vllm_compare, vllm_engine, vllm_exact, vllm_models, vllm_pieces, vllm_run

OPTIONS = {"profile": False, "skip_time": False, "repeat": 5, "engine": {}, "set": {"A": "1"}, "limit": 9.0}
CLASSES = {"own": "vllm.CutlassFp8", "plugin": "deep_gemm.DeepGemmLinear"}


def result_of(who: str, ms: float = 1.0, logprobs: tuple[float, ...] = (0.0,) * 200) -> dict[str, Any]:
    start = {"up_s": 9.0, "first_token_s": 10.0, "kernels": 3}
    return {
        **{"who": who, "model": "qwen3", "vllm": "0.26.0", "gpu": "NVIDIA H100 80GB HBM3", "starts": [start, start]},
        **{"logprobs": list(logprobs), "tokens": [[1, 2, 3], [4, 5, 6]], "deep_gemm": vllm_run.PROVIDERS[who].source},
        "layers": [f"{CLASSES.get(who, 'vllm.DeepGemmFp8')}: qkv_proj x 4"],
        "ms": {"prefill 8 x 1024": [ms, ms / 2, ms * 2], "decode batch 32": [4 * ms] * 3},
        "profile": {"decode batch 32": [["a", 1.5 * ms], ["b", 0.5 * ms]]},
    }


@pytest.mark.parametrize("who", vllm_run.PROVIDERS)
def test_a_process_has_its_providers_variables_and_none_from_outside(who: str, tmp_path: Path) -> None:
    outer = {"PATH": "/bin", "VLLM_USE_DEEP_GEMM": "7", "DG_DISABLE_VLLM_PLUGIN": "7", "PYTHONPATH": "/elsewhere"}
    found = vllm_run.environment(who, tmp_path, outer)
    assert found["PATH"] == "/bin"
    expected = {"ours": ("1", "1"), "plugin": (None, None), "own": ("0", None)}.get(who, ("1", None))
    assert (found.get("VLLM_USE_DEEP_GEMM"), found.get("DG_DISABLE_VLLM_PLUGIN")) == expected
    folders = [Path(path).name for path in found["PYTHONPATH"].split(":")]
    assert folders == ["wheel", "site", "ours"][: 3 if who in ("ours", "plugin") else 2]


def test_metadata_beside_the_package_names_the_plugin(tmp_path: Path) -> None:
    root, kit = tmp_path / "root", tmp_path / "kit"
    for folder in ("deep_gemm", "lab"):
        (root / folder).mkdir(parents=True)
    (root / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(ValueError, match=r"pyproject\.toml: expected an entry point"):
        vllm_run.stage(kit, root)
    (root / "pyproject.toml").write_text('[project.entry-points."vllm.general_plugins"]\ndeep_gemm = "deep_gemm.a:b"\n')
    for _ in range(2):
        vllm_run.stage(kit, root)
    (found,) = importlib.metadata.distributions(path=[str(kit / "ours")])
    assert [(point.group, point.name, point.value) for point in found.entry_points] == [
        ("vllm.general_plugins", "deep_gemm", "deep_gemm.a:b")
    ]
    assert (kit / "ours" / "deep_gemm").samefile(root / "deep_gemm")
    assert (kit / "lab").samefile(root / "lab")


@pytest.mark.parametrize("who", vllm_run.PROVIDERS)
def test_another_provider_than_asked_for_is_found_out(who: str) -> None:
    vllm_run.check(who, result_of(who))
    for other in {"own": ("ours", "plugin")}.get(who, ("own",)):
        with pytest.raises(ValueError, match=f"{who}: expected layers"):
            vllm_run.check(who, result_of(other))
    if who != "own":
        with pytest.raises(ValueError, match=f"{who}: expected deep_gemm of"):
            vllm_run.check(who, result_of(who) | {"deep_gemm": "/elsewhere/deep_gemm"})


@pytest.mark.parametrize("who", ["ours", "exact"])
def test_the_first_start_is_measured_and_the_second_finds_kernels(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def process(module: str, arguments: list[str], variables: dict[str, str], log: Path, limit_s: float) -> None:
        asked.append((module, variables.get("A"), limit_s))
        if module == "vllm_engine":
            start_only = json.loads(arguments[3])["start_only"]
            result = result_of(who, 2.0 if start_only else 1.0) | {"start": {"kernels": 0 if start_only else 3}}
            Path(arguments[2]).write_text(json.dumps(result))

    monkeypatch.setattr(vllm_run, "KIT", tmp_path)
    monkeypatch.setattr(vllm_run, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(vllm_run, "_process", process)
    (tmp_path / "cache" / f"qwen3_{who}").mkdir(parents=True)
    (tmp_path / "cache" / f"qwen3_{who}" / "old.kernel").touch()
    vllm_run.run(who, "qwen3", OPTIONS)
    starts = 1 if who == "exact" else 2
    assert asked == [("vllm_models", None, 9.0), *[("vllm_engine", "1", 9.0)] * starts]
    found = json.loads((tmp_path / "results" / f"qwen3_{who}.json").read_text())
    assert found["ms"] == result_of(who)["ms"]
    assert found["starts"] == [{"kernels": 3}, {"kernels": 0}][:starts]
    assert not (tmp_path / "cache" / f"qwen3_{who}" / "old.kernel").exists()


def test_a_process_that_fails_shows_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_run, "KIT", tmp_path)
    with pytest.raises(RuntimeError, match=r"No module named.*\n.*vllm_nothing ended with 1; .*log has all"):
        vllm_run._process("vllm_nothing", [], {}, tmp_path / "log", 60)


def test_the_command_line_runs_models_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(vllm_run, "stage", lambda *_: None)
    monkeypatch.setattr(vllm_run, "run", lambda who, model, options: ran.append((who, model, options["repeat"])))
    vllm_run.main(["run", "plugin", "qwen3", "qwen3_moe_mxfp4", "--repeat", "2"])
    assert ran == [("plugin", "qwen3", 2), ("plugin", "qwen3_moe_mxfp4", 2)]
    with pytest.raises(SystemExit):
        vllm_run.main(["run", "nobody", "qwen3"])


def test_the_engine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for vLLM compiles a kernel in each call, and answers at once."""

    class Engine:
        def __init__(self, model: str, **arguments: Any) -> None:
            assert arguments["max_model_len"] == 1024
            self.calls = 0

        def generate(self, prompts: list[Any], asked: Any, use_tqdm: bool) -> list[Any]:
            self.calls += 1
            (tmp_path / f"{self.calls}.kernel").touch()
            step = {7: SimpleNamespace(logprob=-1.5)}
            outputs = [SimpleNamespace(token_ids=range(asked.max_tokens))]
            sizes = [len(prompt["prompt_token_ids"]) for prompt in prompts]
            return [SimpleNamespace(prompt_logprobs=[None, *[step] * (n - 1)], outputs=outputs) for n in sizes]

        def apply_model(self, look: Any) -> list[Any]:
            linear = torch.nn.Linear(1, 1)
            linear.quant_method = SimpleNamespace(fp8_linear=Path("a kernel"))  # type: ignore[assignment]
            return [look(torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"proj": linear})}))]

    vllm: Any = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams, vllm.__version__ = Engine, SimpleNamespace, "0"
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    given = iter([1, 2, 3, 4, 4 + 128 * 5, 6, 6 + 128 * 7])  # ms of three prefills, and of two decodes twice
    monkeypatch.setattr(vllm_engine, "of_kernels", lambda *_: {"a": float(next(given))})
    options = OPTIONS | {"begun": 0.0, "start_only": False, "engine": {"max_model_len": 1024}}
    found = vllm_engine.measure("ours", "a folder", options)
    assert found["layers"] == [f"pathlib.{type(Path()).__name__}: proj x 1"]
    assert found["start"]["kernels"] == 1
    assert found["start"]["first_token_s"] >= found["start"]["up_s"] > 0
    assert len(found["logprobs"]) == sum(vllm_engine.LENGTHS) - len(vllm_engine.LENGTHS)
    assert [len(tokens) for tokens in found["tokens"]] == [64] * len(vllm_engine.LENGTHS)
    assert {name: len(values) for name, values in found["ms"].items()} == dict.fromkeys(
        [*vllm_engine.PREFILLS, *vllm_engine.DECODES], 5
    )
    assert list(found["profile"].values()) == [[("a", ms)] for ms in (1, 2, 3, 5, 7)]
    assert "ms" not in vllm_engine.measure("ours", "a folder", options | {"start_only": True})


def test_numbers_of_a_comparison() -> None:
    near = (*[0.01] * 197, 0.5, 0.5, 0.75)
    runs = {"exact": result_of("exact"), "own": result_of("own", 8.0), "vendored": result_of("vendored", 4.0, near)}
    runs |= {"ours": result_of("ours", 2.0, near), "plugin": result_of("plugin", 4.0)}
    runs["ours"]["tokens"] = [[1, 9, 3], [4, 5, 6]]
    tables = vllm_compare.tables_of(runs)
    assert tables["logprobs"]["ours"] == {
        **{"mean": pytest.approx(0.0186), "median": 0.01, "99%": 0.5, "max": 0.75},
        **{"tokens": 4, "bits of vendored": 200, "of": 200},
    }
    assert tables["logprobs"]["plugin"]["max"] == tables["logprobs"]["plugin"]["bits of vendored"] == 0
    assert tables["ms"]["prefill 8 x 1024"]["own"] == 8
    assert tables["ratios"]["decode batch 32"] == {"plugin/own": 0.5, "plugin/vendored": 1.0, "ours/vendored": 0.5}
    assert tables["start"]["own"] == {"empty: s": 10, "empty: kernels": 3, "warm: s": 10, "warm: kernels": 3}
    assert tables["GPU, ms"]["decode batch 32"]["own"] == 16
    assert tables["ratios, GPU"]["decode batch 32"]["plugin/own"] == 0.5


def test_a_comparison_fits_into_80_columns_and_is_written(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = machine.header("engines", "made up", "abcdef123456")
    found |= {"date": "2026-11-26T00:00:00+00:00", "machine": {"gpu": "NVIDIA H100 80GB HBM3"}}
    monkeypatch.setattr(machine, "header", lambda *_: found)
    files = [tmp_path / f"{who}.json" for who in vllm_run.PROVIDERS]
    for number, file in enumerate(files):
        file.write_text(json.dumps(result_of(file.stem, 1234.5678 + number, (-0.0123456,) * 2052)))
    vllm_compare.compare(files, None, None)
    path = results / "engines-h100-2026-11-26-abcdef1.json"
    *tables, last = capsys.readouterr().out.splitlines()
    assert max(map(len, tables)) <= 80
    assert last == f"written to {path}"
    written = json.loads(path.read_text())
    assert written["header"]["plugin/own"] == pytest.approx(1235.5678 / 1237.5678)
    assert written["runs"][0]["ms"]["decode batch 32"] == [4 * 1234.5678] * 3
    found["machine"]["gpu"] = "another"
    with pytest.raises(ValueError, match="files: expected results of another, this machine's GPU"):
        vllm_compare.compare(files, None, None)


@pytest.mark.parametrize("name", vllm_run.MODELS)
def test_a_checkpoint_is_that_of_its_configuration(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    config = vllm_models.config_of(name)
    config |= {"hidden_size": 256, "intermediate_size": 192, "moe_intermediate_size": 128, "vocab_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "q_lora_rank": 128}
    config |= {key: 2 for key in ("num_experts", "n_routed_experts") if key in config}
    vllm_models.make(config, tmp_path, "cpu")
    files = set(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].values())
    found = {key: value for file in files for key, value in safetensors.load_file(tmp_path / file).items()}
    assert json.loads((tmp_path / "config.json").read_text()) == config
    size = config["intermediate_size" if name == "qwen3" else "moe_intermediate_size"]
    down = "model.layers.1.mlp." + ("" if name == "qwen3" else "experts.1.") + "down_proj.weight"
    if name.endswith(vllm_models.MXFP4):
        weight = deep_gemm.cast_back_from_fp4(found[down], found[f"{down}_scale"], gran_k=32)
    else:
        weight = deep_gemm.cast_back_from_fp8(found[down], found[f"{down}_scale_inv"].repeat_interleave(128, 0))
    assert weight.shape == (256, size)
    assert 1.0 < weight.std() * size**0.5 < 3.0
    assert found["model.layers.1.self_attn.o_proj.weight_scale_inv"].dtype == torch.float32


def test_exact_products_are_those_of_the_reference() -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(256, 192), torch.randn(3, 72, 192)
    a, b = deep_gemm.per_token_cast_to_fp8(x), deep_gemm.per_block_cast_to_fp8(weights)
    ids = torch.tensor([2] * 128 + [-1] * 8 + [0] * 120, dtype=torch.int32)
    found, expected = torch.zeros(2, 256, 72, dtype=torch.bfloat16)
    vllm_exact.m_grouped_fp8_gemm_nt_contiguous(a, b, found, ids, disable_ue8m0_cast=True)
    for rows, expert in ((slice(0, 128), 2), (slice(136, 256), 0)):
        deep_gemm.fp8_gemm_nt((a[0][rows], a[1][rows]), (b[0][expert], b[1][expert]), expected[rows])
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-4)
    assert not found[128:136].any()


def test_pieces_make_a_wheel_that_is_as_its_record_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel, kit = tmp_path / "wheel", tmp_path / "kit"
    (wheel / "vllm-0.dist-info").mkdir(parents=True)
    (wheel / "a.py").write_text("a = 1\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"a = 1\n").digest()).decode().rstrip("=")
    (wheel / "vllm-0.dist-info" / "RECORD").write_text(f"a.py,sha256={digest},6\nb.so,sha256=x,1\nRECORD,,\n")
    with tarfile.open(tmp_path / "all.tar.xz", "w:xz") as tar:
        tar.add(wheel, "wheel")
    data = (tmp_path / "all.tar.xz").read_bytes()
    for index, part in enumerate((data[:50], data[50:90], data[90:])):
        folder = tmp_path / str(index) / f"c{index + 1}"
        folder.mkdir(parents=True)
        (folder / "kit.tar.xz.part").write_bytes(part)
        vllm_pieces.unpack(tmp_path / str(index), kit)
        assert (kit / "wheel").exists() == (index == 2)
    assert "1 files are as in RECORD, 1 were left out" in capsys.readouterr().out
    (kit / "wheel" / "a.py").write_text("a = 2\n")
    with pytest.raises(ValueError, match=r"a\.py: expected sha256="):
        vllm_pieces.check(kit / "wheel")
