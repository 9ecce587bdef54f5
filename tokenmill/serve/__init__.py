"""The server: HTTP and text in one process, the engine in another, and what keeps requests alive between them."""
