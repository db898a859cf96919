from services.toy import run

run("prefill")
