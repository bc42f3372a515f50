"""The description of all routes as an OpenAPI 3.1 document, and as a page to read.

Plain dictionaries, made by the functions of ``shapes``; one module per concern describes its routes
(``PATHS``) and their shapes (``SCHEMAS``). tests/http/test_openapi.py holds them to the code.
"""
