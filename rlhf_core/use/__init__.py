"""Use a trained model: chat with a policy, serve it, export it. The command line is __main__.py."""
