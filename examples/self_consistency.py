"""Several answers to one question, and the commonest of them; no more are asked for once one cannot be caught up with.

python examples/self_consistency.py [MODEL]
"""

import sys
from collections import Counter

from tokenmill import LLM
from tokenmill.program import ProgramState, assistant, gen, program, user


@program
def vote(s: ProgramState, question: str, most: int = 9, at_once: int = 3) -> str:
    s += user(f"{question} Answer with one word.")
    votes: Counter[str] = Counter()
    asked = 0
    while asked < most:
        for number, one in enumerate(s.fork(at_once)):
            one += assistant(gen("answer", max_tokens=6, temperature=1.0, seed=asked + number))
            votes[one["answer"].strip().strip(".").lower()] += 1
        asked += at_once
        (_, first), *rest = [*votes.most_common(2), ("", 0)]
        if first > rest[0][1] + most - asked:  # the others cannot win any more
            break
    s.set("asked", str(asked))
    return votes.most_common(1)[0][0]


if __name__ == "__main__":
    with LLM(*sys.argv[1:2]) as llm:
        state = vote.run(llm, question="What colour is the sky on a clear day?")
        print(f"{state.result} (after {state['asked']} answers)")
        print(f"{state.usage.saved_tokens} of {state.usage.prompt_tokens} prompt tokens did not have to be computed")
