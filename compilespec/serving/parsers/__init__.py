"""Parsers of chat models' answers, piece by piece: content, reasoning, tool calls."""
