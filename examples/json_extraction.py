"""Fields of many documents: closed questions are chosen by likelihood, open ones are generated in their form.

python examples/json_extraction.py [MODEL]
"""

import json
import sys

from tokenmill import LLM
from tokenmill.program import ProgramState, gen, program, select

DOCUMENTS = [
    "Dear Sir, the two lamps that I ordered on 3 May came broken. Please send new ones at once. Yours, B. Jones",
    "Hi Ann! The weekend by the lake was lovely, thank you so much for having us. See you in June. Tom",
    "Invoice 4711 of 12 March is still open. We ask you to pay 250 euros within ten days. Miller & Sons",
]


@program
def extract(s: ProgramState, document: str) -> dict[str, str]:
    s += f"Letter: {document}\nAs JSON: " + '{"kind": "' + select("kind", ["complaint", "thanks", "reminder"])
    s += '", "mood": "' + select("mood", ["friendly", "neutral", "angry"])
    s += '", "sender": "' + gen("sender", max_tokens=12, temperature=0, stop='"') + '"}'
    return {name: s[name] for name in ("kind", "mood", "sender")}


if __name__ == "__main__":
    with LLM(*sys.argv[1:2]) as llm:
        states = extract.run_batch(llm, [{"document": one} for one in DOCUMENTS], progress_bar=True)
        for state in states:
            print(json.dumps(state.result))
        usage = states[0].usage
        print(f"{usage.saved_tokens} of {usage.prompt_tokens} prompt tokens did not have to be computed")
