"""A trainer without a model: takes packs, logs them, writes its state after every step, and is killed now and then.

Run as a program it imports torch once and forks a process for every run: each line of its input is a JSON list of
arguments of `train` that run together, and is answered by their exit codes and the producers that they left behind.
Nothing at the top imports torch, since producers import this module as the main one.
"""

import hashlib
import json
import os
import signal
import sys
import threading
from multiprocessing import active_children
from pathlib import Path

STREAMS = 4


def train(folder: str, workers: int, rank: int, world: int, kill_at: int, stop_at: int, balanced: int = 0) -> None:
    """Take packs until the plan ends, or `stop_at`; die by SIGKILL behind the `kill_at`-th.

    FOLDER/log.RANK has the digest of a pack a line, FOLDER/cost.RANK their work; FOLDER/state.json is of all ranks.
    """
    import torch.distributed as dist
    from rows import key, mixed, unchanged

    from bestiary.training.data.balance import Cost
    from bestiary.training.data.loader import PackLoader

    home, group = Path(folder), None
    if world > 1:
        meeting = home / f"meeting.{stop_at}"
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
        group = dist.group.WORLD
    plan = mixed(home, epochs=2, streams=STREAMS)
    loader = PackLoader(
        plan,
        rank=rank,
        world_size=world,
        workers=workers,
        ahead=3,
        make=unchanged,
        group=group,
        balance=Cost(linear=0.0) if balanced else None,
    )
    state, taken = home / "state.json", 0
    costs: list[float] = []
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    with open(home / f"log.{rank}", "a", encoding="utf-8") as log:
        for pack in loader:
            taken += 1
            log.write(hashlib.sha256(repr(key(pack)).encode()).hexdigest() + "\n")
            log.flush()
            costs.append(Cost(linear=0.0)(pack))
            if world == 1 or taken % (STREAMS // world) == 0:
                whole = loader.global_state()
                if rank == 0:
                    state.with_suffix(".new").write_text(json.dumps(whole))
                    os.replace(state.with_suffix(".new"), state)
            if taken == kill_at:
                (home / "producers").write_text(" ".join(str(child.pid) for child in active_children()))
                os.kill(os.getpid(), signal.SIGKILL)
            if taken == stop_at:
                break
    loader.close()
    (home / f"cost.{rank}").write_text(json.dumps(costs))
    if world > 1:
        dist.destroy_process_group()


def serve() -> None:
    """Fork a trainer for every list of arguments on the input, and say how they ended."""
    import rows
    import torch.distributed

    import bestiary.training.data.loader

    assert threading.active_count() == 1, (rows, torch.distributed, bestiary.training.data.loader)
    for line in sys.stdin:
        children = []
        for arguments in json.loads(line):
            child = os.fork()
            if child == 0:
                train(*arguments)
                os._exit(0)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        sys.stdout.write(json.dumps(codes) + "\n")
        sys.stdout.flush()


sys.path.insert(0, str(Path(__file__).parent))
if __name__ == "__main__":
    serve()
