"""Recorded runs of engines: the release, GPU and models of each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lab.bench.cases import RESULTS_FOLDER

MODELS = {
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3 MoE",
    "qwen3_8b": "whole Qwen3-8B",
    "qwen3_30b": "whole Qwen3-30B-A3B",
    "deepseek_v3": "DeepSeek-V3",
    "deepseek_v4": "DeepSeek-V4",
}
"""Titles of models for the page, by the models' names in files."""

FORMS = {"": "", "_row": " by rows", "_bf16": " in BF16"}
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}


def ran() -> str:
    """Return the table of docs/engines.md with the engines that ran on GPUs."""
    titles = {key + form: title + words for key, title in MODELS.items() for form, words in FORMS.items()}
    rows = ["| engine | card | date | with the plugin | with products alone | file |", "|---|---|---|---|---|---|"]
    reports = {path.stem: json.loads(path.read_text()) for path in RESULTS_FOLDER.glob("engines-*.json")}
    for name, report in sorted(reports.items(), key=lambda item: item[1]["header"]["date"]):
        head, card = report["header"], report["header"]["machine"]["gpu"].split()[1]
        engine = next(f"{ENGINES[key]} {release}" for key, release in head["versions"].items() if key in ENGINES)
        with_plugin, alone = (
            ", ".join(title for key, title in titles.items() if any(key == run["model"] for run in found))
            for found in (
                [run for run in report["runs"] if _has_plugin(run)],
                [run for run in report["runs"] if run["who"] in ("ours", "products") and not _has_plugin(run)],
            )
        )
        rows.append(f"| {engine} | {card} | {head['date'][:10]} | {with_plugin} | {alone} | `{name}` |")
    return "\n".join(rows) + "\n"


def _has_plugin(run: Mapping[str, Any]) -> bool:
    """Tell whether the plugin computed a run. Some files show this only by the number of the plugin's calls."""
    return run["who"].startswith("plugin") or any(call.startswith("plugin's") for call in run.get("calls", ()))
