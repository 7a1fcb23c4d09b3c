"""`draftgraph bench`: speculative methods against plain decoding, measured in turns in one process.

prompt_sets    what is asked
options        the settings, checked before anything is loaded
contenders     what answers: our engine with one speculative config, or a peer (`peers`)
runner         who answers what, when; keeps what was measured when it is interrupted
records        what was seen of one answer
figures        quantiles, waits per token and per burst, acceptance
report         the figures of every method, and the JSON document
tables, html_page, charts   the report on the terminal and as a page
"""
