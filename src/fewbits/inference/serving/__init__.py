"""`fewbits serve`: an OpenAI-compatible endpoint over one loaded model.

protocol.py   requests and answers in OpenAI's JSON
turns.py      one request at a time: a bounded queue, and the thread that generates
app.py        the routes, on starlette
server.py     `serve`: opens the model, listens with uvicorn until it is stopped
"""
