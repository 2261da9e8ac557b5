"""What is learned: spans replaced, layouts, who attends to whom, the one loss. Pure; knows no settings and
no files.
"""
