"""A team that answers one question after the other, and how much of its prompts is moved instead of computed.

    python examples/first_reuse.py

Runs on the bundled model. The first questions are computed, and what moving their KV would have changed is measured
beside. Once that is proved to be next to nothing, what an agent reads of another one is translated: the question moves
from the solver's prompt, and answers from where they were written.
"""

from itertools import islice

from kedge import LocalEngine, run
from kedge.workloads.miniature import MATH, questions

team = MATH.workflow()  # a solver, an analyst, a programmer, an inspector, and one who reads all and decides
with LocalEngine() as engine:
    for number, question in enumerate(islice(questions(seed=1), 12), 1):
        result = run(engine, team, {"user_question": question.text})
        receipt = result.results[-1].completion.receipt
        print(f"{number}: {result.text} {receipt.translated} of {receipt.prompt_tokens} prompt tokens translated")
        engine.wait_idle()  # for what is measured in idle time: here there is none between two questions
