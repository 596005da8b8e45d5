"""A launch without a plan: of kernels whose parameters are quickly packed."""

from __future__ import annotations

from ..jit import driver


def launch(launcher: driver.Launcher, params: bytes, grid: int, device: int) -> None:
    """Launch with these parameters on the current stream of the current device, which is `device`."""
    with launcher.lock:
        launcher.hold(None, params, grid)
        stream = launcher.current_stream(device)
        if stream != launcher.stream:
            launcher.set_stream(stream)
        (status,) = launcher.start(launcher.config, launcher.function, launcher.pointers, 0)
        if status != launcher.success:
            launcher.start_again(status, device)
