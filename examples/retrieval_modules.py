"""Questions over retrieved documents: each document is read once, and copied into prompts that have it in any order.

python examples/retrieval_modules.py [MODEL]
"""

import re
import sys
from typing import Any

from tokenmill import LLM, SamplingParams

DOCUMENTS = {
    "windmill": "The windmill at Holt was built in 1786 for a miller named Peter Lund. Its cap turns with a tail pole, "
    "and its four sails drive two pairs of stones. A storm broke one of the sails in 1911; it was replaced within a "
    "year, and the mill ground wheat until 1952. Since then it has been a museum, open from May to September.",
    "watermill": "The watermill at Brede stands below a dam of oak and clay. Its wheel is five metres wide and turns "
    "six times a minute. It was built in 1640 as a paper mill, and ground rye from 1802 on. The dam gave way in the "
    "flood of 1879, and since it was built again in stone the pond has never been empty.",
    "tide mill": "The tide mill at Sund has a pond that the sea fills twice a day. When the tide is out, the water "
    "leaves under the floor and turns two wheels for about five hours. The monks of the abbey built it in 1492. It "
    "is the only one of its kind on that coast, and its owner, Anna Berg, still grinds flour with it at weekends.",
}
QUESTIONS = [
    "Which storm broke a sail of the windmill at Holt?",
    "Who owns the tide mill, and who built it?",
    "When did the dam of the watermill give way in a flood?",
    "Does the windmill or the watermill still grind flour?",
]


def retrieve(question: str) -> list[str]:
    """The documents, those first that have most words of the question."""
    return sorted(DOCUMENTS, key=lambda name: -len(words_of(question) & words_of(DOCUMENTS[name])))


def words_of(text: str) -> set[str]:
    return {word for word in re.findall(r"\w+", text.lower()) if len(word) > 3}


def message(question: str) -> dict[str, Any]:
    documents = [{"type": "text", "text": f"{DOCUMENTS[one]}\n", "cache_module": True} for one in retrieve(question)]
    asked = {"type": "text", "text": f"\nAnswer from these texts, in one sentence: {question}"}
    return {"role": "user", "content": [*documents, asked]}


if __name__ == "__main__":
    with LLM(*sys.argv[1:2]) as llm:
        params = SamplingParams(temperature=0, max_tokens=32)
        saved = copied = asked = 0
        for question in QUESTIONS:
            [output] = llm.chat([message(question)], params, use_tqdm=False)
            print(f"{question} (read: {', '.join(retrieve(question))})\n  {output.outputs[0].text.strip()}")
            saved, copied = saved + output.num_cached_tokens, copied + output.num_module_tokens
            asked += len(output.prompt_token_ids or [])
        print(f"{saved} of {asked} prompt tokens did not have to be computed, {copied} were copied from documents")
