import os
import signal

import pytest
import torch
import torch.distributed as dist

from train.distributed import StopSignals, broadcast, gather


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_closed_terminal_stops_a_run_unless_it_is_ignored(
    handler: signal.Handlers,
) -> None:
    numbers = (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        signal.signal(signal.SIGHUP, handler)
        stop = StopSignals()
        os.kill(os.getpid(), signal.SIGHUP)
        stopped = handler is signal.SIG_DFL
        assert stop.agreed(torch.device("cpu")) == stopped
        assert broadcast(7) == 7 and gather(7) == [7]
    finally:
        dist.destroy_process_group()
        for number, previous in before.items():
            signal.signal(number, previous)
