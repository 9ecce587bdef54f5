"""The engine process: its loop, the messages to and from it, and what a crash leaves behind."""
