"""What any room may use: axes and messages, integers, tracing, extras, torch's private names."""
