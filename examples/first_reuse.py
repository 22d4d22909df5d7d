"""A team that answers one question after the other, and how much of its prompts is moved instead of computed.

    python examples/first_reuse.py

Runs on the bundled model. The first two questions are samples: from the third on, what an agent reads of another one is
translated. Here two samples are enough, because the questions are alike; by default it takes four (`min_anchors`).
"""

from itertools import islice

from kedge import AnchorSettings, EngineSettings, LocalEngine, run
from kedge.workloads.miniature import MATH, workflow

team = workflow(MATH, agents=3)  # a solver, an analyst, and one who reads both and decides
questions = islice(MATH.questions("test", seed=1), 5)
with LocalEngine(config=EngineSettings(anchors=AnchorSettings(min_anchors=2))) as engine:
    for number, question in enumerate(questions, 1):
        result = run(engine, team, {"user_question": question.text})
        receipt = result.results[-1].completion.receipt
        print(f"{number}: {result.text} {receipt.translated} of {receipt.prompt_tokens} prompt tokens translated")
