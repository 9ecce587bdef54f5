"""Routing: which replica gets a request, and what each has cached. Plain data, for the simulator and for servers."""
