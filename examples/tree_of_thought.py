"""Three ways on, the likeliest right one is kept, twice over: branches share everything that came before them.

python examples/tree_of_thought.py [MODEL]
"""

import sys

from tokenmill import LLM
from tokenmill.program import ProgramState, gen, program, select


@program
def think(s: ProgramState, question: str, depth: int = 2, width: int = 3) -> str:
    s += f"Question: {question}\nLet us think step by step.\n"
    best = s
    for level in range(depth):
        ways = best.fork(width)
        for number, way in enumerate(ways):
            way += f"Step {level + 1}:" + gen("step", max_tokens=30, temperature=1.0, seed=number, stop="\n")
            way += "\nIs this step right? " + select("right", ["yes", "no"]) + "\n"
        best = max(ways, key=lambda way: way.meta("right")["scores"]["yes"])
    best += "Answer:" + gen("answer", max_tokens=30, temperature=0, stop="\n")
    return best.text()


if __name__ == "__main__":
    with LLM(*sys.argv[1:2]) as llm:
        state = think.run(llm, question="How many legs do three dogs and two birds have?")
        print(state.result)
        print(f"{state.usage.saved_tokens} of {state.usage.prompt_tokens} prompt tokens did not have to be computed")
