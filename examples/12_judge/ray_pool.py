"""Judge kernels on all machines of a Ray cluster: python ray_pool.py, which starts a cluster of this machine if there is none."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import opjit
from opjit.judge import Verdict


# begin: pool
@ray.remote
class NodeJudge:
    """A judge in a process of one node."""

    def __init__(self, task: str, seed: int) -> None:
        self.judge = opjit.judge.Judge(task, seed=seed)
        self.judge.start()

    async def workers(self) -> int:
        return self.judge.workers

    async def verdict(self, text: str, name: str) -> Verdict:
        return await self.judge(text, name)


async def judge_all(candidates: Mapping[str, str], task: str, seed: int) -> dict[str, Verdict]:
    """Return the verdicts on texts by their names. If a node is lost, other nodes judge its candidates."""
    judges = set()
    free = asyncio.Queue()
    for node in filter(lambda node: node["Alive"], ray.nodes()):
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        gpus = node["Resources"].get("GPU", 0)
        judges.add(NodeJudge.options(scheduling_strategy=here, num_gpus=gpus).remote(task, seed))
    for judge in judges:
        for _ in range(await judge.workers.remote()):
            free.put_nowait(judge)

    async def verdict(name: str) -> Verdict:
        while judges:
            judge = await free.get()
            if judge in judges:
                try:
                    return await judge.verdict.remote(candidates[name], name)
                except ray.exceptions.RayActorError:
                    judges.discard(judge)
                finally:
                    free.put_nowait(judge)
        raise RuntimeError("all nodes of the cluster are lost")

    verdicts = await asyncio.gather(*map(verdict, candidates))
    return dict(zip(candidates, verdicts, strict=True))
# end: pool


if __name__ == "__main__":
    from tune import C

    ray.init()
    kernels = {f"{lanes} lanes": C % {"lanes": lanes} for lanes in (1, 2, 4, 8, 16, 32)}
    kernels["wrong"] = kernels["8 lanes"].replace("sums[0] += from[i]", "sums[0] += 0")
    task = str(Path(__file__).parent)
    for name, verdict in asyncio.run(judge_all(kernels, task, seed=7)).items():
        print(f"{verdict.verdict:<8} {name}  {verdict.message}")
