"""The edge: the command line and the server. Knows the engine's public interface and nothing below it."""
