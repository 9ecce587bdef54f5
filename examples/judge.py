"""A judge: which of two answers is better, by how likely the model finds each verdict, asked in both orders.

python examples/judge.py [MODEL]
"""

import sys

from tokenmill import LLM
from tokenmill.program import ProgramState, program, select


@program
def judge(s: ProgramState, question: str, answers: list[str]) -> int:
    s += f"Question: {question}\n"
    totals = [0.0, 0.0]
    for order, one in zip(((0, 1), (1, 0)), s.fork(2), strict=True):
        one += f"Answer A: {answers[order[0]]}\nAnswer B: {answers[order[1]]}\nThe better answer is "
        one += select("verdict", ["A", "B"])
        for letter, which in zip("AB", order, strict=True):
            totals[which] += one.meta("verdict")["scores"][letter]
    return totals.index(max(totals))


if __name__ == "__main__":
    with LLM(*sys.argv[1:2]) as llm:
        answers = ["Bread is made of flour, water and yeast.", "Bread bread bread."]
        state = judge.run(llm, question="What is bread made of?", answers=answers)
        print(f"the better answer: {answers[state.result]}")
        print(f"{state.usage.saved_tokens} of {state.usage.prompt_tokens} prompt tokens did not have to be computed")
