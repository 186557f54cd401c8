"""Record of a run that outlives it: entries, log frames, the merge of several logs, and what displays show.

May import ``agent_client`` and what is below it; never torch. Pure: files, sockets and clocks do not belong
here. The worker writes its log (`training`), and the agent keeps and copies it (`agent`).
"""
