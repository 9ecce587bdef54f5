"""Speculative decoding: who proposes how answers may go on, how likely each guess is, and how many are worth a step."""
