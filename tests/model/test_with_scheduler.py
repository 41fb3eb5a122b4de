from tests.engine.builders import make_config, make_request
from tests.model.plan_driver import GREEDY
from tests.model.reference import LENGTHS, generate_greedy, random_prompts
from worker.engine.outputs import FinishEvent, TokenEvent
from worker.engine.scheduler import Scheduler
from worker.model.loader import load_model
from worker.model.runner import TorchRunner
from worker.model.tiny import make_tiny


def test_the_engine_generates_what_transformers_generates():
    """Scheduler, runner and detokeniser together: tokens and text of 16 concurrent prompts are those of generate."""
    model = load_model("tiny")
    reference, _ = make_tiny()
    limits = {"num_blocks": 200, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    scheduler = Scheduler(make_config(**limits, max_model_len=model.max_model_len))
    runner = TorchRunner(model, **limits)
    prompts = random_prompts(LENGTHS, 256, seed=2)
    for i, prompt in enumerate(prompts):
        request = make_request(
            str(i),
            prompt=prompt,
            sampling=GREEDY,
            max_tokens=12,
            eos_token_ids=model.eos_token_ids,
            ignore_eos=True,
            new_detokenizer=model.tokenizer.new_detokenizer,
        )
        assert scheduler.add(request) == []
    events = []
    while scheduler.has_work:
        plan, early = scheduler.schedule(0.0)
        events += early + scheduler.apply(runner.execute(plan), 0.0)
        scheduler.check_integrity()
    for i, prompt in enumerate(prompts):
        own = [event for event in events if event.request_id == str(i)]
        want = generate_greedy(reference.eval(), prompt, 12)
        assert [event.token.token_id for event in own if isinstance(event, TokenEvent)] == want
        text = "".join(event.tail if isinstance(event, FinishEvent) else event.text for event in own)
        assert text == model.tokenizer.decode(want)
