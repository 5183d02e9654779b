"""`caravan run`: a chat in the terminal.

commands      what a line of the user is: words for the model, or a command
conversation  messages, settings and branches, and the file that keeps them
markdown      a streamed answer as whole blocks
terminal      what the user types and sees
cli           the command line, pipes, and the server
"""
