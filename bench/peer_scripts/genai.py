"""OpenVINO GenAI: its continuous batching on a GGUF file."""

from collections import deque

import numpy as np
import openvino
import openvino_genai
import peer_script

CACHE_GB = 1


def main() -> None:
    workload = peer_script.read_workload()
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.max_num_seqs = workload["seats"]
    scheduling.cache_size = CACHE_GB
    scheduling.enable_prefix_caching = False
    properties = {
        "KV_CACHE_PRECISION": "f32",
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": workload["threads"],
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(workload["model"], scheduling, "CPU", properties)

    def serve(requests, recorder):
        waiting, running = deque(enumerate(requests)), {}
        while waiting or running:
            # With its default, dynamic_split_fuse, its scheduler takes prompts in without looking at max_num_seqs: of
            # 24 requests all run at once. So they are handed over as seats come free, and it has as many as the others.
            while waiting and len(running) < workload["seats"]:
                i, request = waiting.popleft()
                generation = openvino_genai.GenerationConfig(
                    max_new_tokens=request["max_tokens"], ignore_eos=True, do_sample=False
                )
                prompt = openvino.Tensor(np.array([request["token_ids"]], dtype=np.int64))
                running[i] = pipeline.add_request(i, prompt, generation)
            pipeline.step()
            for i, handle in list(running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        recorder.add(i, output.generated_ids)
                if len(recorder.answers[i]["token_ids"]) >= requests[i]["max_tokens"]:
                    del running[i]

    peer_script.run(workload, serve, {"openvino": openvino.get_version(), "openvino-genai": openvino_genai.__version__})


if __name__ == "__main__":
    main()
