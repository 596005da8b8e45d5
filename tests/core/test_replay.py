"""Records of random calls: replay.c serves the same calls as replay.py, with the same launches."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import in_threads, raising
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deep_gemm.core import record as records
from deep_gemm.core import replay
from deep_gemm.core.jit.tensor_map import ElementType, TensorMap
from deep_gemm.core.params import Field, Kind, Params
from deep_gemm.core.record import Record
from deep_gemm.core.settings import settings
from deep_gemm.core.shadow import Mapped, Number, Recording, Shadow, least, most

CPU = torch.device("cpu")
SOURCE = Path(replay.__file__).with_name("replay.c")
STREAM = 0
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
COMPILER = shutil.which("cc") or shutil.which("gcc")
DTYPES = torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.int32, torch.uint8
PARAMS = Params(
    "Params",
    *(Field(f"map_{i}", Kind.MAP) for i in range(2)),
    *(Field(f"at_{i}", Kind.POINTER) for i in range(3)),
    *(Field(f"n_{i}", Kind.UINT32) for i in range(4)),
    Field("pair", Kind.UINT64, 2),
)


class Driver:
    """Records each launch of either replay: its kernel, CTAs, attributes and parameters."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.status, self.fails_from = 0, 1
        self.lock = threading.Lock()

    def encoded(self, *facts: Any) -> bytes:
        """Return 128 bytes in place of an encoded map: a text of everything that the map depends on."""
        return repr(facts).encode().ljust(128, b".")[:128]

    def kernel(self, function: int, cluster: int = 1) -> SimpleNamespace:
        """Return an object in place of a kernel."""
        launcher = lambda config, device, is_dependent: self.launcher(function, cluster, is_dependent)  # noqa: E731
        return SimpleNamespace(params_of=lambda config: PARAMS, launcher=launcher)

    def launcher(self, function: int, cluster: int, is_dependent: bool) -> SimpleNamespace:
        """Return an object in place of a kernel's launcher, for both replays."""
        of = SimpleNamespace(
            function=function,
            threads=128,
            kernel=SimpleNamespace(shared_bytes=64),
            cluster=cluster,
            is_dependent=is_dependent,
        )
        of.lock, of.config, of.pointers, of.success, of.stream = threading.Lock(), None, None, 0, None
        of.current_stream = lambda _: STREAM
        of.set_stream = lambda stream: setattr(of, "stream", stream)

        def encode(tensor_map: TensorMap, address: int, _: int) -> bytes:
            element, swizzle = replay.ELEMENTS[tensor_map.element], replay.SWIZZLES[tensor_map.swizzle]
            numbers = tensor_map.sizes, tensor_map.strides, tensor_map.box
            return self.encoded(element, address % (1 << 64), *numbers, swizzle)

        def hold(params: bytes, grid: int) -> None:
            held = bytearray(params.ljust(-(-len(params) // 8) * 8))
            of.params = SimpleNamespace(bytes=held, words=memoryview(held).cast("Q"))
            of.held = len(params), grid

        def start(*_: Any) -> tuple[int]:
            count, grid = of.held
            self.launches.append((function, grid, cluster, is_dependent, of.stream, bytes(of.params.bytes[:count])))
            return (self.status,)

        of.encode, of.hold, of.start, of.keeps_addresses = encode, hold, start, lambda: False
        return of


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Config), ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_size_t),
    *(ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64)),
    *(ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint32)),
    *[ctypes.c_int] * 4,
)
DEVICE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))


class Native:
    """A build of replay.c that calls a driver which records its arguments."""

    def __init__(
        self,
        module: Any,
        driver: Driver,
        empty: Callable[..., Any] = torch.empty_strided,
        classes: tuple[type, type] = (Tensor, torch.nn.Parameter),
    ) -> None:
        self.module, self.driver, self.device, self.empty = module, driver, 0, empty
        self.functions = LAUNCH(self.launch), ENCODE(self.encode), DEVICE(self.current_device)
        pointers = (ctypes.cast(each, ctypes.c_void_p).value for each in self.functions)
        table = torch.Tensor.__dlpack_c_exchange_api__
        module.setup(table, *pointers, *classes, self.make, torch.is_grad_enabled, failed)

    def make(self, *of: Any, **how: Any) -> Any:
        """Replace torch.empty_strided."""
        return self.empty(*of, **how)

    def launch(self, config: Any, function: int, params: Any, extra: Any) -> int:
        """Replace cuLaunchKernelEx."""
        of = config.contents
        assert (*of.grid[1:], *of.block, of.shared_bytes, extra) == (1, 1, 128, 1, 1, 64, None)
        attributes = {}
        for i in range(of.num_attributes):
            kind, *value = (ctypes.c_uint * 5).from_address(of.attributes + 72 * i)
            attributes[kind] = value
        cluster, is_dependent = attributes.get(4, [0, 1])[1], attributes.get(6, [0, 0])[1] == 1
        given = ctypes.string_at(params[0], PARAMS.size)
        self.driver.launches.append((function, of.grid[0], cluster, is_dependent, of.stream or STREAM, given))
        return self.driver.status if len(self.driver.launches) >= self.driver.fails_from else 0

    def encode(self, room: int, element: int, rank: int, address: int, *rest: Any) -> int:
        """Replace cuTensorMapEncodeTiled."""
        sizes, strides, box, ones, interleave, swizzle, promotion, fill = rest
        assert (ones[:rank], interleave, promotion, fill) == ([1] * rank, 0, 3, 0)
        numbers = tuple(sizes[:rank]), tuple(strides[: rank - 1]), tuple(box[:rank])
        encoded = self.driver.encoded(element, address, *numbers, swizzle)
        (ctypes.c_char * 128).from_address(room).raw = encoded  # `memmove` would release the GIL
        return 0

    def current_device(self, device: Any) -> int:
        """Replace cuCtxGetDevice."""
        device[0] = self.device
        return 0


def failed(launcher: Any, status: int, grid: int) -> None:
    """Raise an error for a failed launch, as the driver's module does."""
    raise RuntimeError(f"launch of {launcher.function} by {grid} CTAs: {status}")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Build replay.c and return it as a module."""
    if COMPILER is None or not hasattr(Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("needs a C compiler, and a torch with DLPack's table")
    path = tmp_path_factory.mktemp("replay") / "_replay.abi3.so"
    include = sysconfig.get_paths()["include"]
    words = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{include}"]
    words += SANITIZERS if "DG_TEST_SANITIZED" in os.environ else ()
    subprocess.run([COMPILER, *words, str(SOURCE), "-o", str(path)], check=True)
    return loaded(path)


def loaded(path: Path) -> Any:
    """Load a build of replay.c."""
    spec = importlib.util.spec_from_file_location("_replay", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def native(built: Any) -> Iterator[Native]:
    yield Native(built, Driver())


def tensor(random: Random, rows: int, columns: int, dtype: torch.dtype, pitch: int, skew: int = 0) -> Tensor:
    """Make a matrix in memory of its own that begins `skew` elements after a multiple of 256 bytes."""
    room = torch.zeros(max(rows * pitch, 1) + skew + 256, dtype=dtype)
    first = -room.data_ptr() % 256 // dtype.itemsize + skew
    return room[first:].as_strided((rows, columns), (pitch, 1))


def expression(random: Random, numbers: list[Any], depth: int = 3) -> Any:
    """Draw an expression of the given numbers."""
    if depth == 0 or random.random() < 0.2:
        return random.choice([*numbers, random.randrange(1, 40)])
    a, b = (expression(random, numbers, depth - 1) for _ in range(2))
    divisor = random.choice((2, 3, 4, 16, 100))
    kinds = (lambda: a + b, lambda: a - b, lambda: a * b, lambda: a // divisor, lambda: -(-a // divisor) * divisor)
    return random.choice((*kinds, lambda: a % divisor, lambda: least(a, b), lambda: most(a, b)))()


def drawn(random: Random, driver: Driver) -> tuple[Record, list[Tensor], list[int]]:
    """Draw a call, record it, and return the record, its tensors and the integers that the call passes."""
    recording = Recording(CPU)
    stated = [random.randrange(1, 50) for _ in range(random.randrange(3))]
    numbers, tensors, shadows = recording.stated_numbers(stated), list[Tensor](), list[Shadow]()
    for _ in range(random.randrange(1, 5)):
        rows, columns, dtype = random.randrange(2, 90), random.choice((8, 64)), random.choice(DTYPES)
        x = tensor(random, rows, columns, dtype, columns + random.choice((0, 16)))
        shadow = recording.shadow(x, *random.choice((((), ()), ((0,), ()), ((0,), (0,)))))
        numbers += [each for each in (*shadow.shape, *shadow.strides) if isinstance(each, Number)]
        tensors.append(x)
        shadows.append(shadow)

    def positive() -> Any:
        return most(expression(random, numbers), 1)

    for _ in range(random.randrange(3)):
        recording.holds(random.choice([*records.Relation]), expression(random, numbers), expression(random, numbers))
    recording.outputs = random.randrange(min(2, len(shadows)))
    rooms = [recording.room((positive() % 500, 8), random.choice(DTYPES)) for _ in range(random.randrange(5))]
    results = [random.choice((x, x.view(-1), x.mT, x[:, :4])) for x in rooms[: random.randrange(3)]]
    for _ in range(random.randrange(1, 5)):
        places = [*shadows, *rooms]
        values = {f"n_{i}": expression(random, numbers) % (1 << 32) for i in range(4)}
        values |= {f"at_{i}": random.choice(places) for i in range(3)}
        values["at_0"] = random.choice((None, random.choice(places)))
        values["pair"] = random.choice((random.choice(places), 5)), expression(random, numbers) % (1 << 40)
        for i in range(2):
            swizzle, element = random.choice((0, 32, 64, 128)), random.choice([*ElementType])
            box = 8, least(positive(), 64)
            tensor_map = TensorMap(element, (positive(), positive()), (positive() * 16,), box, swizzle)
            values[f"map_{i}"] = Mapped(tensor_map, random.choice(places), 16 * random.randrange(3))
        kernel = driver.kernel(random.randrange(1, 99), random.choice((1, 2)))
        recording.launch(kernel, None, values, positive() % 1000, -1, random.random() < 0.5)
    return recording.record(results), tensors, stated


def others(random: Random, tensors: list[Tensor]) -> list[Tensor]:
    """Draw the tensors of another call: with other rows, pitches and addresses, or with other types and columns."""
    found = []
    for x in tensors:
        rows, columns = x.shape
        kind = random.random()
        rows = rows if kind < 0.3 else random.randrange(1, 120)
        pitch = x.stride(0) if random.random() < 0.8 else x.stride(0) + 16
        dtype = x.dtype if random.random() < 0.95 else random.choice(DTYPES)
        columns = columns if random.random() < 0.95 else 16
        found.append(tensor(random, rows, columns, dtype, max(pitch, columns), random.choice((0, 0, 0, 1, 4))))
    if len(found) > 1 and random.random() < 0.2:
        found[0] = found[1]
    return found


def numbers_of(record: Record, tensors: Sequence[Tensor], stated: Sequence[int] = ()) -> list[int] | None:
    """Return the record's numbers for these tensors, or None if it does not serve them."""
    if len(tensors) != len(record.given):
        return None
    for x, given in zip(tensors, record.given, strict=True):
        if x.dtype != given.dtype or x.get_device() != record.device or x.dim() != len(given.sizes):
            return None
        for mine, its in zip((*given.sizes, *given.strides), (*x.shape, *x.stride()), strict=True):
            if mine not in (-1, its):
                return None
    return replay.computed(record, tensors, stated)


def both(native: Native, record: Record, packed: Any, tensors: list[Tensor], stated: Sequence[int] = ()) -> bool:
    """Replay a call in both ways in the same memory; compare launches and results; return whether it is served."""
    driver, had = native.driver, list[Tensor]()
    driver.launches.clear()

    def kept(*of: Any, **how: Any) -> Tensor:
        had.append(empty(*of, **how))
        return had[-1]

    empty, native.empty = native.empty, kept
    answer = native.module.replay(packed, tuple(tensors), tuple(stated))
    native.empty = empty
    mine = [*driver.launches]
    driver.launches.clear()
    values = numbers_of(record, tensors, stated)
    if values is None or not replay.are_apart(tensors, record.outputs):
        assert answer is NotImplemented and mine == []
        return False

    def again(sizes: Any, strides: Any = (1,), *, dtype: torch.dtype, device: torch.device) -> Tensor:
        x = had.pop(0)
        assert (x.shape, x.stride()) == (torch.Size(sizes if isinstance(sizes, list) else [sizes]), tuple(strides))
        assert (x.dtype, x.device) == (dtype, device)
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_strided", again)
        patch.setattr(torch, "empty", again)
        made = replay.replay(record, tensors, values, CPU)
    assert had == [] and mine == driver.launches
    facts = [[(x.shape, x.stride(), x.dtype, x.data_ptr()) for x in each] for each in (answer, made)]
    assert facts[0] == facts[1]
    return True


@pytest.mark.parametrize("seed", range(40))
def test_both_replays_launch_the_same(native: Native, seed: int) -> None:
    random = Random(seed)
    served = 0
    for _ in range(10):
        record, tensors, stated = drawn(random, native.driver)
        packed = replay.packed(native.module, record, CPU)
        assert both(native, record, packed, tensors, stated)
        assert native.module.replay(packed, tuple(tensors), (*stated, 1)) is NotImplemented
        for _ in range(20):
            other = [x if random.random() < 0.8 else random.randrange(1, 50) for x in stated]
            served += both(native, record, packed, others(random, tensors), other)
    assert served > 0


def one_launch(native: Native, *, with_scratch: bool = False, scales: bool = False) -> tuple[Record, Any, list[Tensor]]:
    """Record a call that allocates a matrix like its operand, which has any number of rows, and makes two launches."""
    x = tensor(Random(0), 6, 64, torch.float32 if scales else torch.bfloat16, 64)
    r = Recording(CPU)
    shadow = r.shadow(x, (0,))
    made = r.room(shadow.shape, x.dtype)
    between = r.room(shadow.shape, torch.float32) if with_scratch else shadow
    m = shadow.shape[0]
    tensor_map = TensorMap(ElementType.UINT8, (64, m), (64,), (64, 8), 64)
    values = {"at_0": shadow, "at_1": made, "at_2": between, **{f"n_{i}": m for i in range(4)}, "pair": (3, m)}
    values |= {f"map_{i}": Mapped(tensor_map, shadow) for i in range(2)}
    for function in (7, 8):
        r.launch(native.driver.kernel(function), None, values, m, -1, False)
    record = r.record([made])
    return record, replay.packed(native.module, record, CPU), [x]


def test_a_record_serves_other_rows(native: Native) -> None:
    record, packed, _ = one_launch(native)
    assert all(both(native, record, packed, [tensor(Random(0), rows, 64, torch.bfloat16, 64)]) for rows in (1, 6, 77))


class Subclass(Tensor):
    """A tensor of another class."""


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.requires_grad_(),
        torch.nn.Parameter,
        lambda x: x.as_subclass(Subclass),
        lambda x: torch.zeros(3, 64, dtype=torch.complex64).conj().imag,
        lambda x: x.to("meta"),
        lambda x: x.to_sparse(),
        lambda x: x.numpy(),
        lambda x: None,
        lambda x: x[:, :32],
        lambda x: x[:, 1:],
        lambda x: x.t(),
        lambda x: x[None],
        lambda x: x.double(),
        FakeTensorMode().from_tensor,
    ],
)
def test_other_calls_go_back_to_python(native: Native, other: Any) -> None:
    _, packed, (x,) = one_launch(native, scales=True)
    assert native.module.replay(packed, (x,), ()) is not NotImplemented
    native.driver.launches.clear()
    assert native.module.replay(packed, (other(x.clone()),), ()) is NotImplemented
    assert native.module.replay(packed, (x, x), ()) is NotImplemented
    assert native.module.replay(packed, (), ()) is NotImplemented
    assert native.driver.launches == []


@pytest.mark.parametrize("is_native", [True, False])
def test_records_are_found_by_all_that_is_not_free(native: Native, is_native: bool) -> None:
    """A record serves any number of rows, but only one pitch, one alignment of addresses and one number of integers."""
    record, _, _ = one_launch(native)
    kept = replay.Records([((0,), ())] * 2, native.module if is_native else None)

    def answer(*tensors: Any, stated: Any = ()) -> Any:
        if len(kept) == 0:
            kept.keep(kept.name(tensors, stated), record, CPU)
        return kept.recall(tensors, stated)

    assert all(len(answer(tensor(Random(0), m, 64, torch.bfloat16, 64))[0]) == m for m in (6, 1, 77))
    assert answer(tensor(Random(0), 6, 64, torch.bfloat16, 64, skew=8)) is not NotImplemented
    launched, x = len(native.driver.launches), tensor(Random(0), 6, 64, torch.bfloat16, 64)
    wider, behind = (tensor(Random(0), 6, 64, torch.bfloat16, *of) for of in ((72,), (64, 1)))
    for others in ((wider,), (behind,), (x.half(),), (x, x), (), (x.requires_grad_(),), (x[0],)):
        assert answer(*others) is NotImplemented
    assert all(answer(x.detach(), stated=stated) is NotImplemented for stated in ((3,), (3.0,), (True,)))
    assert len(native.driver.launches) == launched


@pytest.mark.parametrize(
    ("said", "is_served"),
    [
        ((3, (1, None, (2.0,))), True),
        ((3.0, (1, None, (2.0,))), False),
        ((3, (True, None, (2.0,))), False),
        ((3, (1, None, (2,))), False),
        ((3, (1, None)), False),
        ((), False),
    ],
)
def test_answers_are_by_what_was_said_and_its_types(native: Native, said: Any, is_served: bool) -> None:
    record, _, (x,) = one_launch(native)
    kept: Any = replay.Records([((0,), ())], native.module)
    key, answer = (replay, (3, (1, None, (2.0,))), int, tuple, 7), native.module.answer
    kept.keep(kept.name((x,)), record, CPU)
    kept.parts = kept._kept, kept._bits, [int, tuple, float], len
    assert answer({key: kept}, replay, said, 7, (x,), ()) == (1 if is_served else NotImplemented)
    assert answer({key: kept}, replay, said, 8, (x,), ()) is NotImplemented
    malformed: Any
    for malformed in ((key, said), ({key: kept}, replay, [], 7, (x,), ()), ({}, [], (), 7, (x,), ())):
        with pytest.raises((ValueError, TypeError)):
            answer(*malformed)


@pytest.mark.parametrize("is_native", [True, False])
def test_the_oldest_records_go(native: Native, is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_ALIKE", 2)
    monkeypatch.setattr(replay, "MOST_RECORDS", 3)
    kept = replay.Records([((0,), ())], native.module if is_native else None)
    calls = [tensor(Random(0), rows, columns, torch.bfloat16, 40) for columns in (8, 16, 24, 32) for rows in (1, 2, 3)]
    for x in calls:  # each record serves its own number of rows alone
        assert kept.recall((x,), ()) is NotImplemented
        r = Recording(CPU)
        int(r.shadow(x, (0,)).shape[0])
        kept.keep(kept.name((x,)), r.record([]), CPU)
        assert kept.recall((x,), ()) is not NotImplemented
    assert len(kept) == 3 * 2
    if is_native:  # replay.py also remembers the last calls
        served = [kept.recall((x,), ()) is not NotImplemented for x in calls]
        assert served == [False] * 3 + [False, True, True] * 3


def test_a_gradient_is_no_matter_where_none_is_wanted(native: Native) -> None:
    _, packed, (x,) = one_launch(native)
    with torch.no_grad():
        assert native.module.replay(packed, (x.requires_grad_(),), ()) is not NotImplemented


def test_another_current_device_goes_back_to_python(native: Native) -> None:
    _, packed, tensors = one_launch(native)
    native.device = 1
    assert native.module.replay(packed, tuple(tensors), ()) is NotImplemented


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_a_transform_goes_back_to_python(native: Native, transform: Any) -> None:
    _, packed, (x,) = one_launch(native, scales=True)
    answers = []

    def called(y: Tensor) -> Tensor:
        answers.append(native.module.replay(packed, (y,), ()))
        return y.sum()

    transform(called)(x[None] if transform is torch.vmap else x)
    assert answers == [NotImplemented] and native.driver.launches == []


def test_inference_mode_is_served(native: Native) -> None:
    record, packed, (x,) = one_launch(native)
    with torch.inference_mode():
        of_inference = x.clone()
        assert both(native, record, packed, [x]) and both(native, record, packed, [of_inference])
        assert native.module.replay(packed, (x,), ())[0].is_inference()
    assert both(native, record, packed, [of_inference])


def test_a_drivers_error_names_the_launch(native: Native) -> None:
    _, packed, tensors = one_launch(native)
    native.driver.status = 719
    for which, name in enumerate((7, 8)):
        native.driver.launches.clear()
        native.driver.fails_from = which + 1
        with pytest.raises(RuntimeError, match=f"launch of {name} by 6 CTAs: 719"):
            native.module.replay(packed, tuple(tensors), ())
        assert len(native.driver.launches) == which + 1


@pytest.mark.parametrize("have", [0, 1])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no more"), None])
def test_memory_that_cannot_be_had_ends_a_call_before_its_launches(built: Any, have: int, error: Any) -> None:
    made = list[weakref.ref[Tensor]]()

    def empty(*of: Any, **how: Any) -> Any:
        if len(made) < have:
            x = torch.empty_strided(*of, **how)
            made.append(weakref.ref(x))
            return x
        if error is not None:
            raise error
        return None  # no tensor: the table reports this by an error

    native = Native(built, Driver(), empty)
    _, packed, tensors = one_launch(native, with_scratch=True)
    with pytest.raises((torch.OutOfMemoryError, RuntimeError, TypeError, ValueError)) as raised:
        native.module.replay(packed, tuple(tensors), ())
    assert error is None or raised.value is error
    assert native.driver.launches == [] and [x() for x in made] == [None] * have


def test_threads_replay_one_record(native: Native) -> None:
    _, packed, _ = one_launch(native, with_scratch=True)
    calls = [tensor(Random(0), rows, 64, torch.bfloat16, 64) for rows in range(1, 9)]
    made: list[Any] = []

    def run(x: Tensor) -> None:
        made.extend((x, *native.module.replay(packed, (x,), ())) for _ in range(50))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # the real driver holds the GIL, so threads must not switch inside of this one
    try:
        in_threads(run, calls)
    finally:
        sys.setswitchinterval(interval)
    assert all(y.shape == x.shape for x, y in made)
    at, n = (PARAMS.offset(name) for name in ("at_0", "n_0"))
    launched = [
        (grid, int.from_bytes(given[at : at + 8], "little"), int.from_bytes(given[n : n + 4], "little"))
        for _, grid, *_, given in native.driver.launches
    ]
    assert sorted(launched) == sorted((len(x), x.data_ptr(), len(x)) for x in calls for _ in range(100))


def test_a_forked_process_replays(native: Native) -> None:
    _, packed, tensors = one_launch(native)
    child = os.fork()
    if child == 0:
        os._exit(len(native.module.replay(packed, tuple(tensors), ())) + len(native.driver.launches))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1 + 2


AT_THE_END = """
import atexit, sys
from pathlib import Path
import test_replay
native = test_replay.Native(test_replay.loaded(Path(sys.argv[1])), test_replay.Driver())
_, packed, tensors = test_replay.one_launch(native)
replay = lambda: print(len(native.module.replay(packed, tuple(tensors), ())), flush=True)
atexit.register(replay)
class Late:
    def __del__(self, replay=replay): replay()
sys.modules["late"] = Late()
"""


def test_a_replay_while_the_interpreter_ends(built: Any) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", AT_THE_END, built.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n1\n", "")


@pytest.mark.release
@pytest.mark.skipif("DG_TEST_SANITIZED" in os.environ, reason="the sanitizers are on")
def test_sanitizers_find_nothing_in_all_of_these_tests(built: Any) -> None:
    libraries = []
    for name in ("asan", "ubsan"):
        asked = (str(COMPILER), f"-print-file-name=lib{name}.so")
        libraries.append(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    if not all(Path(library).is_absolute() for library in libraries):
        pytest.skip("the C compiler has no sanitizers here")
    # Python frees much of its memory only when it exits, which would look like leaks.
    options = {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0", "DG_TEST_SANITIZED": "1"}
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env={**os.environ, **options}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_it_is_told_which_replay_runs_and_why(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> tuple[bool, str]:
        settings.cache_clear()
        replay._native.cache_clear()
        return replay.native() is built, replay.which()

    monkeypatch.setattr(replay, "import_module", lambda *_: built)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert told() == (False, "Python: torch finds no GPU")
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(ctypes, "CDLL", raising(OSError("libcuda.so.1: no such file")))
        assert told() == (False, "Python: libcuda.so.1: no such file")
        patch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(**dict.fromkeys(replay.FUNCTIONS, DEVICE(lambda _: 0))))
        assert told() == (True, "replay.c")
        patch.setattr(built, "SOURCE_DIGEST", 1, raising=False)
        assert told() == (False, "Python: replay.c was built before it changed; install the package again")
        patch.setattr(replay, "import_module", raising(ModuleNotFoundError()))
        assert told() == (False, "Python: replay.c was not built when the package was installed")
        patch.setattr(replay, "Tensor", object)
        assert told() == (False, f"Python: torch {torch.__version__} has no __dlpack_c_exchange_api__")
        patch.setenv("DG_DISABLE_NATIVE_REPLAY", "1")
        assert told() == (False, "Python: DG_DISABLE_NATIVE_REPLAY is set")
    told()


def test_a_replay_keeps_no_tensor(native: Native) -> None:
    record, packed, (x,) = one_launch(native, with_scratch=True)
    native.module.replay(packed, (x,), ())
    gc.collect()
    before = sys.getrefcount(x), sys.getrefcount(packed), sys.getrefcount(torch.bfloat16)
    for _ in range(100):
        (made,) = native.module.replay(packed, (x,), ())
    gc.collect()
    assert (sys.getrefcount(x), sys.getrefcount(packed), sys.getrefcount(torch.bfloat16)) == before
    assert sys.getrefcount(made) == 2
    of = record.launches[0].kernel
    held = sys.getrefcount(of)
    del packed
    assert sys.getrefcount(of) == held - 1


def parts() -> list[Any]:
    """Return the parts of a small, correct record."""
    given = (4, 16, 1, 0, (-1, 8), (8, 1))
    launch = (5, 128, 0, 1, 0, 0, bytes(256), ((128, 8, 0, (0, 0, 0)),), ((0, (0, 0, 0), 0, 0, (1, 2), (0,), (0, 0)),))
    made = (1, 2), (2, 0), {"dtype": torch.bfloat16}, (1,), (0,)
    steps = (0, 1, 0), (1, 0, 0), (0, 8, 0), (3, 1, 2), (10, 0, 0)
    return [(1, 0), (given,), 1, steps, ((0, 0, 1, 1),), 1, (made,), (0, {}), (launch,), []]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((0,), (1,)),
        ((1,), [1]),
        ((1, 0, 4), (1,) * 6),
        ((1, 0, 5), (1,)),
        ((1, 0), (4, 16, 1, 0, (-1, 8))),
        ((2,), 0),
        ((2,), None),
        ((3,), ()),
        ((3, 0), (0, 2, 0)),
        ((3, 1), (1, 1, 0)),
        ((3, 1), (1, 0, 2)),
        ((3, 3), (3, 3, 0)),
        ((3, 3), (11, 0, 0)),
        ((3, 3), (3, 0)),
        ((3, 4), (10, 1, 0)),
        ((3, 4), (10, -1, 0)),
        ((4, 0), (2, 0, 0, 1)),
        ((4, 0), (0, 0, 5, 1)),
        ((5,), 2),
        ((5,), -1),
        ((5,), None),
        ((6, 0, 0), (1, 5)),
        ((6, 0, 1), (1,)),
        ((6, 0, 3), (1, 2)),
        ((6, 0, 4), (5,)),
        ((6, 0, 4), None),
        ((7, 0), 5),
        ((8, 0, 0), "5"),
        ((8, 0, 5), 5),
        ((8, 0, 6), bytes(100)),
        ((8, 0, 6), "text"),
        ((8, 0, 7, 0), (249, 8, 0, None)),
        ((8, 0, 7, 0), (0, 2, 0, None)),
        ((8, 0, 7, 0), (0, 4, 0, (0, 0, 0))),
        ((8, 0, 7, 0), (0, 8, 0, (1, 1, 0))),
        ((8, 0, 7, 0), (0, 8, 0, (3, 0, 0))),
        ((8, 0, 8, 0, 0), 32),
        ((8, 0, 8, 0, 0), 192),
        ((8, 0, 8, 0, 5), (0, 0)),
        ((8, 0, 8, 0, 4), ()),
    ],
)
def test_a_malformed_record_is_refused(native: Native, path: tuple[int, ...], value: Any) -> None:
    assert native.module.Record(*parts())

    def changed(part: Any, path: tuple[int, ...]) -> Any:
        if not path:
            return value
        first, *rest = path
        return type(part)([changed(each, tuple(rest)) if i == first else each for i, each in enumerate(part)])

    with pytest.raises((ValueError, TypeError)):
        native.module.Record(*changed(parts(), path))
