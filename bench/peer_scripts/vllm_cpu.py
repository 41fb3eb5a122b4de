"""vLLM's CPU build: its engine in this process."""

import os

import peer_script
import torch
import vllm
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind


def main() -> None:
    workload = peer_script.read_workload()
    cpus = sorted(os.sched_getaffinity(0))[: workload["threads"]]  # by itself it keeps one for a server's front end
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=workload["model"],
            dtype="float32",
            enforce_eager=True,
            max_num_seqs=workload["seats"],
            max_model_len=workload["max_len"],
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
    )

    def serve(requests, recorder):
        for i, request in enumerate(requests):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(str(i), {"prompt_token_ids": request["token_ids"]}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                recorder.add(int(output.request_id), output.outputs[0].token_ids)

    peer_script.run(workload, serve, {"torch": torch.__version__, "vllm": vllm.__version__})


if __name__ == "__main__":  # the engine may start processes
    main()
