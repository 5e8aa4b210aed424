"""The detokenizer process: token records into text, between `tok` and the reply streams."""
