"""Many requests at once from one model: a shared prefix is computed once, a conversation goes on from where it ended,
a state is forked, and in exact mode none of it changes a bit.

The weights are random (the shape of the quickstart), so the answers mean nothing; their equality does.
"""

from perilune import ModelConfig, Transformer
from perilune.model import EXACT, Sampling, generate, initialize
from perilune.serve import LLM, EngineConfig, Params

model = initialize(Transformer(ModelConfig.from_pretrained("nano")), seed=0)
llm = LLM(model, EngineConfig(arena_bytes=20_000_000, slots=8, token_budget=256, exact=True))

# Eight questions about one document: the first computes it, the others wait for that and find it.
document = [(7 * i * i + 3 * i) % 2000 for i in range(300)]
questions = [[*document, 10 + i, 20 + i] for i in range(8)]
answers = llm.generate(questions, max_tokens=12, temperature=0)
computed = llm.engine.counters.prefill
print(f"{sum(map(len, questions))} prompt tokens, {computed} computed, cached: {[a.cached for a in answers]}")
assert computed < 700

# Each alone, without engine and cache: the same tokens.
for question, answer in zip(questions, answers, strict=True):
    alone = list(generate(model.with_parts(EXACT), question, 12, Sampling(temperature=0), exact=True))
    assert alone == answer.tokens

# The end of an answer is held; four worlds go on from it.
(first,) = llm.generate([document], max_tokens=100, temperature=0, hold=60.0)
forks = llm.fork(first.hold, 4)
worlds = [[*document, *first.tokens, 50 + i] for i in range(4)]
rollouts = llm.generate(worlds, [Params(max_tokens=10, temperature=1.0, seed=i, logprobs=0) for i in range(4)])
for hold, rollout in zip(forks, rollouts, strict=True):
    print(f"{len(rollout.prompt)} prompt tokens, {rollout.cached} cached, log p = {rollout.logprobs[0].logprob:.3f}")
    assert rollout.cached == 384  # exact states lie on a grid of 64 tokens
    llm.release(hold)

llm.engine.check_integrity()
