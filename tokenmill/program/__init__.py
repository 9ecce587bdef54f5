"""Programs: Python functions that make many calls of a model which know about each other. See docs/programs.md."""

from tokenmill.program.expressions import assistant, gen, select, system, user
from tokenmill.program.remote import RemoteLLM
from tokenmill.program.run import Program, program
from tokenmill.program.state import Branches, ProgramState

__all__ = [
    "Branches",
    "Program",
    "ProgramState",
    "RemoteLLM",
    "assistant",
    "gen",
    "program",
    "select",
    "system",
    "user",
]
