"""The gateway: three chat APIs in processes of their own, in front of a stock SGLang engine.

One request of any API becomes one `Conversation` (conversation.py). One renderer makes its prompt (render.py), one
generator reads the engine's answer (generate.py), and each API has a reader of requests and a writer of answers
(chat.py, responses.py, messages.py). Nothing here imports sglang or torch.
"""
