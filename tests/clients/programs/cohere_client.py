"""cohere: reranks, with both versions of its API.

usage: as openai_client.py.
"""

import sys

import cohere

url, model = sys.argv[1:3]
asked = {
    "model": model,
    "query": "Paris is a city",
    "documents": ["I like bread", "London is a city"],
}

for kind in (cohere.ClientV2, cohere.Client):
    client = kind(api_key="none", base_url=url)
    results = client.rerank(**asked, top_n=2).results
    assert [each.index for each in results] == [1, 0]
    assert 1 >= results[0].relevance_score > results[1].relevance_score >= -1
    try:
        client.rerank(**{**asked, "model": "other"})
    except cohere.errors.NotFoundError:
        continue
    raise AssertionError("no error")
