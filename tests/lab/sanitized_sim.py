"""Run kernels in the simulator, both compiled with ASan and UBSan. ASan must be preloaded.

    LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 python tests/lab/sanitized_sim.py

Every trial runs with one configuration. Then one kernel is broken to read past the end of an array; the process must
end there.
"""

from __future__ import annotations

import checkout  # noqa: F401

from deep_gemm.hyper.kernel_few import HcFewConfig
from lab.sim import library
from lab.sim.hc_prenorm import HcFewTrial
from lab.sim.trials import TRIALS

FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
FEW = "hc_prenorm_few.cuh"
WHOLE, BEHIND = "squares[row][0] + squares[row][1];", "squares[row][0] + squares[row + 2][1];"


def main() -> None:
    library._FLAGS = (*library._FLAGS, *FLAGS)
    library._MODEL_FLAGS = ("-O1",)  # compiles in half the time
    library._LIBRARIES = ()  # links the sanitizers' libraries too
    for kind in TRIALS:
        config = next(each for each in kind.kernel.configs() if kind.takes(each))
        print(f"{kind.kernel.name} {config.name}", flush=True)
        kind.drawn(config, 0).run()
    print("nothing found", flush=True)
    trial = HcFewTrial(HcFewConfig(24, 2, 4, 2), 37, 24, 448, 2)
    source = trial.headers()[FEW]
    assert source.count(WHOLE) == 1
    trial.run({FEW: source.replace(WHOLE, BEHIND)})


if __name__ == "__main__":
    main()
