"""An agent that picks tools until it answers: each turn goes on from the one before, and nothing is read twice.

python examples/agent_loop.py [MODEL]
"""

import sys
from collections.abc import Callable

from tokenmill import LLM
from tokenmill.program import ProgramState, gen, program, select

TOOLS: dict[str, Callable[[str], str]] = {
    "population": lambda city: {"paris": "2.1 million", "rome": "2.8 million"}.get(city.strip().lower(), "unknown"),
    "weather": lambda city: "sunny, 21 degrees",
}


@program
def agent(s: ProgramState, question: str, most: int = 4) -> str:
    s += f"Question: {question}\nTools: {', '.join(TOOLS)}. Choose a tool and a city, or give the answer.\n"
    for _ in range(most):
        s += "Next: " + select("next", [*TOOLS, "answer"])
        if s["next"] == "answer":
            break
        s += " of" + gen("city", max_tokens=4, temperature=0, stop=["\n", ",", "."])
        s += f"\nResult: {TOOLS[s['next']](s['city'])}\n"
    s += ":" + gen("answer", max_tokens=24, temperature=0, stop="\n")
    return s["answer"]


if __name__ == "__main__":
    with LLM(*sys.argv[1:2]) as llm:
        state = agent.run(llm, question="Do more people live in Rome than in Paris?")
        print(state.text())
        print(f"{state.usage.saved_tokens} of {state.usage.prompt_tokens} prompt tokens did not have to be computed")
