"""The edge: the command line and the demonstration. Knows the engine's public interface and nothing below it."""
