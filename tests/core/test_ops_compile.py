"""torch.compile and torch.export of public functions: whole graphs, any number of rows, the bits of an eager call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_cases import Case, assert_same, compiled, compressed_logits, copies, exported, queries

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.host_compiler)]


def operators_of(graph: torch.fx.Graph) -> set[str]:
    """Return the names of the package's operators in a graph."""
    names = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    return {name.removeprefix("deep_gemm.").removesuffix(".default") for name in names if "deep_gemm" in name}


@compiled
@pytest.mark.combinations
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_any_number_of_rows(case: Case, backend: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # slow, and every worker imports this file

    counter = CompileCounterWithBackend(backend)
    found = torch.compile(case.call, fullgraph=True, backend=counter)
    for m in case.sizes:
        inputs = case.inputs(m)
        expected_inputs = copies(inputs)
        if m == case.sizes[0]:
            case.dynamic(inputs)
        got, expected = found(*inputs), case.call(*expected_inputs)
        assert_same((got, inputs), (expected, expected_inputs))
    assert counter.frame_count == 1
    assert operators_of(counter.graphs[0].graph) == case.operators


class Calling(torch.nn.Module):
    """A module that makes a case's call."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.case.call(*inputs)


@exported
@pytest.mark.combinations
@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_serve_any_number_of_rows(case: Case, strict: bool) -> None:
    inputs = tuple(case.inputs(case.sizes[0]))
    program = torch.export.export(Calling(case), inputs, dynamic_shapes=(case.shapes(),), strict=strict)
    assert operators_of(program.graph) == case.operators
    for m in case.sizes[1:]:
        inputs = tuple(case.inputs(m))
        expected_inputs = copies(inputs)
        got, expected = program.module()(*inputs), case.call(*expected_inputs)
        assert_same((got, inputs), (expected, tuple(expected_inputs)))


def test_a_width_of_logits_by_position_may_be_a_size_that_is_open() -> None:

    def widest(q: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        weights, starts, ends = inputs
        return compressed_logits(q, weights, starts, ends, q.shape[0] + 3)

    compiled = torch.compile(widest, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (4, 9, 30):
        got = compiled(*queries(m))
        assert got.shape == (m, m + 3)
        assert torch.equal(got, widest(*queries(m)))
