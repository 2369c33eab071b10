from mxprobe.trace import open_trace
from mxprobe.schema import TABLES
import pandas as pd, numpy as np
a=open_trace("/tmp/w-facts/old/run.mxprobe"); b=open_trace("/tmp/w-facts/old/new.mxprobe")
for t in TABLES:
    x,y=a.table(t),b.table(t)
    drop=[c for c in x if c.endswith("_ns") or c in ("sent_bytes",)]
    if t=="events": x=x.iloc[:len(x)-5]; 
    x,y=x.drop(columns=drop).astype(object),y.drop(columns=drop).astype(object)
    if t=="events":
        d=[(p,q) for p,q in zip(x[["step","kind","detail"]].values.tolist(),y[["step","kind","detail"]].values.tolist()) if p!=q]
        print(t,len(x),len(y),d[:6]); print(y[["kind","subject","state","data"]].to_string())
        continue
    if t=="modules": key=["module"]
    same = len(x)==len(y)
    bad=[]
    if same:
        for c in x:
            u,v=x[c].tolist(),y[c].tolist()
            for i,(p,q) in enumerate(zip(u,v)):
                if isinstance(p,np.ndarray): ok=np.array_equal(p,q)
                else: ok=p==q or (p!=p and q!=q) or (pd.isna(p) and pd.isna(q))
                if not ok: bad.append((c,i,p,q)); break
    print(t,len(x),len(y),same,bad[:4])
