"""The HTTP process's side of the engine: the service, its supervisor, admission, and the streams of answers."""
