"""Text: to ids and back, chats, conversations, infilling layouts, files of rows."""
