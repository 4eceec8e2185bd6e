"""What a chat model writes, taken apart as it comes: content, reasoning, tool calls."""
