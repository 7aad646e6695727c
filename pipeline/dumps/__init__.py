"""Raw router dumps: one module per layout, each turning a file into blocks of rows in recorded order.

`blocks` says what a parser hands over, `sniff` decides by content which parser a file is for. Typing of passes, event
numbers and the checks of a whole dump belong to `pipeline.canonical`.
"""
