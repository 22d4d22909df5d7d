"""A team that answers one question after the other, and how much of its prompts is moved instead of computed.

    python examples/first_reuse.py

Runs on the bundled model. The first questions are computed, and what moving their KV would have changed is measured
beside. Once that is proved to be next to nothing, what an agent reads of another one is translated: the question moves
from the solver's prompt, and answers from where they were written.
"""

from itertools import islice

from kedge import LocalEngine, run
from kedge.workloads.miniature import MATH

team = MATH.workflow(3)  # a solver, an analyst, and one who reads both and decides
questions = islice(MATH.questions("test", seed=1), 12)
with LocalEngine() as engine:
    for number, question in enumerate(questions, 1):
        result = run(engine, team, {"user_question": question.text})
        receipt = result.results[-1].completion.receipt
        print(f"{number}: {result.text} {receipt.translated} of {receipt.prompt_tokens} prompt tokens translated")
        engine.wait_idle()  # for what is measured in idle time: here there is none between two questions
