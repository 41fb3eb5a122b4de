"""transformers' own continuous batching."""

import peer_script
import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PAGE_SIZE = 16


def main() -> None:
    workload = peer_script.read_workload()
    torch.set_num_threads(workload["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        workload["model"], dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    seats = workload["seats"]
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=workload["max_len"]),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=seats * (workload["max_len"] // PAGE_SIZE + 1),
            max_batch_tokens=512,
            max_requests_per_batch=seats,
            allow_block_sharing=False,
        ),
    )

    def serve(requests, recorder):
        for i, request in enumerate(requests):
            manager.add_request(
                request["token_ids"], request_id=str(i), max_new_tokens=request["max_tokens"], streaming=True
            )
        num_known = [0] * len(requests)
        for output in manager:
            if output.error:
                raise RuntimeError(output.error)
            i = int(output.request_id)
            recorder.add(i, output.generated_tokens[num_known[i] :])
            num_known[i] = len(output.generated_tokens)
            if recorder.complete:
                return

    with torch.inference_mode():
        manager.start()
        try:
            peer_script.run(workload, serve, {"torch": torch.__version__, "transformers": transformers.__version__})
        finally:
            manager.stop(block=True)


if __name__ == "__main__":
    main()
