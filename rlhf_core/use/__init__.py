"""Using what a run has made: chatting with a policy, serving it, handing it on. The command line is __main__.py."""
