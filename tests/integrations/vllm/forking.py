"""Engine processes that are forked from one that has imported vLLM: a start imports nothing, which takes 6 s of CPU."""

import os
from multiprocessing.context import ForkServerContext, ForkServerProcess

IMPORTED = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "kedge.integrations.vllm.plugin.connector",
    "kedge.integrations.vllm.plugin.scheduler",
)


class Forked(ForkServerProcess):
    """A process in the environment of the one that starts it, as a spawned one."""

    def start(self) -> None:
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        super().run()


class Forking(ForkServerContext):
    Process = Forked


def context() -> Forking:
    """Return what takes the place of vLLM's `get_mp_context`."""
    found = Forking()
    found.set_forkserver_preload([*IMPORTED])
    return found
